"""A DataModule that augments whole batches in on_after_batch_transfer (Kornia / torchgeo style)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy, MetricCollection, Precision

L.seed_everything(2021)


class ToyScenes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.images = torch.rand(n, 4, 16, 16, generator=g)
        self.labels = torch.randint(0, 3, (n,), generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class ScenesDataModule(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        self.mean = torch.full((4, 1, 1), 0.5)
        self.std = torch.full((4, 1, 1), 0.25)

    def setup(self, stage):
        if stage in ("fit", "validate"):
            self.train_ds = ToyScenes(64, 0)
            self.val_ds = ToyScenes(24, 1)
        if stage == "test":
            self.test_ds = ToyScenes(24, 2)

    def train_dataloader(self):
        return DataLoader(self.train_ds, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_ds, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_ds, self.hparams.batch_size)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x = batch["image"]
        x = (x - self.mean.to(x)) / self.std.to(x)
        if self.trainer.training:
            if torch.rand(1).item() < 0.5:
                x = x.flip(-1)
            x = x + 0.05 * torch.randn_like(x)
        batch["image"] = x
        return batch


class SceneClassifier(L.LightningModule):
    def __init__(self, in_channels=4, num_classes=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, num_classes),
        )
        metrics = MetricCollection(
            {
                "OverallAccuracy": Accuracy(task="multiclass", num_classes=num_classes),
                "Precision": Precision(task="multiclass", num_classes=num_classes, average="macro"),
            }
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        y_hat = self(batch["image"])
        loss = F.cross_entropy(y_hat, batch["label"])
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        self.train_metrics(y_hat, batch["label"])
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        y_hat = self(batch["image"])
        self.log("val_loss", F.cross_entropy(y_hat, batch["label"]), on_step=False, on_epoch=True)
        self.val_metrics(y_hat, batch["label"])

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch, batch_idx):
        y_hat = self(batch["image"])
        self.log("test_loss", F.cross_entropy(y_hat, batch["label"]), on_step=False, on_epoch=True)
        self.test_metrics(y_hat, batch["label"])
        self.log_dict(self.test_metrics)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


dm = ScenesDataModule()
model = SceneClassifier()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, dm)
results = trainer.test(model, dm)
