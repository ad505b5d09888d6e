"""ReduceLROnPlateau watching a validation loss, EarlyStopping beside it (docs' configure_optimizers)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRegression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(7, 20)
        self.l2 = nn.Linear(20, 20)
        self.l3 = nn.Linear(20, 1)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        val_loss = F.mse_loss(self(x), y)
        self.log("val_loss", val_loss, prog_bar=True)
        return {"val_loss": val_loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=0),
                "monitor": "val_loss",
                "frequency": 1,
            },
        }


x = torch.randn(80, 7)
y = torch.randn(80, 1)
train = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=10, shuffle=True)
val = DataLoader(TensorDataset(x[60:], y[60:]), batch_size=10)
model = LitRegression()
early = EarlyStopping(monitor="val_loss", patience=3)
trainer = L.Trainer(
    max_epochs=4, logger=CSVLogger("csv"), callbacks=[early, LearningRateMonitor()], log_every_n_steps=2
)
trainer.fit(model, train, val)
result_lr = trainer.optimizers[0].param_groups[0]["lr"]
result_best = early.best_score.item()
results = trainer.validate(model, val)
