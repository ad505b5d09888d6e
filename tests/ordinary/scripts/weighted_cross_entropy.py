"""Class imbalance: weighted cross entropy, a WeightedRandomSampler-free tabular classifier (Kaggle style)."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score, MulticlassRecall

pl.seed_everything(2023)


class TabularDataModule(pl.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        x, y = make_classification(240, 16, n_informative=8, n_classes=3, weights=[0.75, 0.18, 0.07], random_state=0)
        torch.save((torch.tensor(x, dtype=torch.float32), torch.tensor(y)), "tabular.pt")

    def setup(self, stage=None):
        x, y = torch.load("tabular.pt")
        x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=0.3, stratify=y, random_state=0)
        self.train_set, self.val_set = TensorDataset(x_train, y_train), TensorDataset(x_val, y_val)

    @property
    def class_weights(self):
        counts = torch.bincount(self.train_set.tensors[1], minlength=3).float()
        return counts.sum() / (len(counts) * counts)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class ImbalancedClassifier(pl.LightningModule):
    def __init__(self, class_weights, lr=3e-3):
        super().__init__()
        self.save_hyperparameters("lr")
        self.model = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 3),
        )
        self.criterion = nn.CrossEntropyLoss(weight=class_weights)
        self.metrics = MetricCollection(
            {"f1": MulticlassF1Score(3), "recall": MulticlassRecall(3, average="none")}, prefix="val_"
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", self.criterion(logits, y), prog_bar=True)
        self.metrics.update(logits, y)

    def on_validation_epoch_end(self):
        values = self.metrics.compute()
        self.log("val_f1", values["val_f1"], prog_bar=True)
        for i, recall in enumerate(values["val_recall"]):
            self.log(f"val_recall_{i}", recall)
        self.metrics.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


dm = TabularDataModule()
dm.prepare_data()
dm.setup()
model = ImbalancedClassifier(dm.class_weights)
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=5)
trainer.fit(model, datamodule=dm)
results = trainer.validate(model, datamodule=dm)
