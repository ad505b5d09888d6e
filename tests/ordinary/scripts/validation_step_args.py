"""A module whose validation_step and test_step take (*args, **kwargs) and share one step (nnU-Net-like wrappers)."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(5)


class BaseTask(pl.LightningModule):
    """Everything apart from the network."""

    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.criterion = nn.L1Loss()

    def shared_step(self, batch, batch_idx, stage):
        x, y = batch
        pred = self(x)
        loss = self.criterion(pred, y)
        self.log(f"{stage}/loss", loss, prog_bar=stage != "test", on_epoch=True, on_step=stage == "train")
        return {"loss": loss, "pred": pred.detach()}

    def training_step(self, *args, **kwargs):
        return self.shared_step(*args, stage="train", **kwargs)

    def validation_step(self, *args, **kwargs):
        return self.shared_step(*args, stage="val", **kwargs)

    def test_step(self, *args, **kwargs):
        return self.shared_step(*args, stage="test", **kwargs)

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=self.hparams.lr)


class MLPTask(BaseTask):
    def __init__(self, width=16, depth=3, **kwargs):
        super().__init__(**kwargs)
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.out(x)


x = torch.randn(120, 6)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1)
train_loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10, shuffle=True)
val_loader = DataLoader(TensorDataset(x[80:100], y[80:100]), batch_size=10)
test_loader = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=10)

model = MLPTask(lr=5e-3)
trainer = pl.Trainer(max_epochs=2, check_val_every_n_epoch=1, val_check_interval=0.5)
trainer.fit(model, train_loader, val_loader)
result_val = trainer.validate(model, val_loader)
result_test = trainer.test(model, test_loader)
