"""A temporal convolutional network with causal, weight-normed residual blocks (locuslab/TCN in Lightning)."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, IterableDataset

pl.seed_everything(1111)


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation, dropout=0.1):
        super().__init__()
        padding = (kernel_size - 1) * dilation
        self.net = nn.Sequential(
            weight_norm(nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation)),
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(dropout),
            weight_norm(nn.Conv1d(n_outputs, n_outputs, kernel_size, padding=padding, dilation=dilation)),
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None
        self.relu = nn.ReLU()

    def forward(self, x):
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(self.net(x) + res)


class AddingProblem(IterableDataset):
    """Sum the two marked numbers of a sequence; made on the fly."""

    def __init__(self, n, length, seed):
        self.n, self.length, self.seed = n, length, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            values = torch.rand(self.length, generator=g)
            marks = torch.zeros(self.length)
            marks[torch.randperm(self.length, generator=g)[:2]] = 1.0
            yield torch.stack([values, marks]), (values * marks).sum()


class TCN(pl.LightningModule):
    def __init__(self, channels=(12, 12, 12), kernel_size=3, lr=4e-3):
        super().__init__()
        self.save_hyperparameters()
        blocks = []
        n_in = 2
        for i, n_out in enumerate(channels):
            blocks.append(TemporalBlock(n_in, n_out, kernel_size, dilation=2**i))
            n_in = n_out
        self.tcn = nn.Sequential(*blocks)
        self.linear = nn.Linear(n_in, 1)

    def forward(self, x):
        return self.linear(self.tcn(x)[:, :, -1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


train = DataLoader(AddingProblem(100, 16, seed=1), batch_size=10)
val = DataLoader(AddingProblem(30, 16, seed=2), batch_size=10)
model = TCN()
trainer = pl.Trainer(max_epochs=2, val_check_interval=5, limit_train_batches=8, log_every_n_steps=2)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
