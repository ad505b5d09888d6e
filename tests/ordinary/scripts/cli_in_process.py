"""LightningCLI run in-process with args=[...]: fit, then test from the checkpoint (docs' CLI pages)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self, hidden_dim: int = 16, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(9, hidden_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, 3),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.net(x), y))


class DataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(88, 9, generator=g), torch.randint(0, 3, (88,), generator=g)
        self.train = TensorDataset(x[:64], y[:64])
        self.val = TensorDataset(x[64:], y[64:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class MyLightningCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.hidden_dim", compute_fn=lambda n: 2 * n)


cli = MyLightningCLI(
    Model,
    DataModule,
    seed_everything_default=1234,
    args=[
        "fit",
        "--trainer.max_epochs=2",
        "--trainer.log_every_n_steps=2",
        "--trainer.gradient_clip_val=1.0",
        "--data.batch_size=8",
        "--optimizer=AdamW",
        "--optimizer.lr=0.01",
        "--lr_scheduler=torch.optim.lr_scheduler.ExponentialLR",
        "--lr_scheduler.gamma=0.9",
    ],
)
result_fit = {k: v.item() for k, v in cli.trainer.callback_metrics.items()}
result_hidden = cli.model.hparams.hidden_dim
results = cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path="best")
