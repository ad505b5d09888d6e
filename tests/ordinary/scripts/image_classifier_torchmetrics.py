"""MNIST-style image classifier on scikit-learn's digits, with torchmetrics and test (pl_examples style)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

L.seed_everything(7, workers=True)


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        digits = load_digits()
        x = torch.tensor(digits.images[:256], dtype=torch.float32).unsqueeze(1) / 16.0
        y = torch.tensor(digits.target[:256], dtype=torch.long)
        full = TensorDataset(x, y)
        self.train_set, self.val_set, self.test_set = random_split(
            full, [160, 48, 48], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.batch_size)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden=16, lr=0.01, num_classes=10):
        super().__init__()
        self.save_hyperparameters()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, hidden, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(hidden * 4, 32)
        self.fc2 = nn.Linear(32, num_classes)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")
        self.confmat = MulticlassConfusionMatrix(num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc.update(logits, y)
        self.confmat.update(logits, y)
        self.log("test_loss", F.nll_loss(logits, y))
        self.log("test_acc", self.test_acc)

    def on_test_epoch_end(self):
        self.confusion = self.confmat.compute()
        self.confmat.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [scheduler]


dm = DigitsDataModule()
model = LitClassifier()
checkpoint = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
trainer = L.Trainer(
    max_epochs=2,
    logger=CSVLogger("logs", name="digits"),
    callbacks=[checkpoint, LearningRateMonitor(logging_interval="step")],
    log_every_n_steps=2,
)
trainer.fit(model, datamodule=dm)
result_val = trainer.validate(model, datamodule=dm)
results = trainer.test(ckpt_path="best", datamodule=dm)
result_confusion = model.confusion.cpu()
result_best = checkpoint.best_model_score.item()
