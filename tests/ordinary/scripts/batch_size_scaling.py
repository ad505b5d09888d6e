"""Batch-size scaling through Tuner with a DataModule that has a batch_size (docs' page)."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(28)


class LitDataModule(pl.LightningDataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size
        g = torch.Generator().manual_seed(0)
        self.data = TensorDataset(torch.randn(64, 12, generator=g), torch.randint(0, 3, (64,), generator=g))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


class LitModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


model = LitModel()
datamodule = LitDataModule()
trainer = pl.Trainer(max_epochs=2, logger=False)
tuner = Tuner(trainer)
result_batch_size = tuner.scale_batch_size(
    model, datamodule=datamodule, mode="power", steps_per_trial=2, init_val=2, max_trials=3
)
trainer.fit(model, datamodule=datamodule)
result_loss = trainer.callback_metrics["train_loss"].item()
result_steps = trainer.global_step
