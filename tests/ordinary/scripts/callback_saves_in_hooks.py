"""Callbacks that save a checkpoint in setup, on_fit_end and teardown (home-made "always save" callbacks)."""

from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(11)


class SaveAtSetup(Callback):
    """Keeps the initial weights, to compare with later."""

    def setup(self, trainer, pl_module, stage):
        if stage == "fit":
            Path("weights").mkdir(exist_ok=True)
            torch.save(pl_module.state_dict(), "weights/initial.pt")


class SaveAtFitEnd(Callback):
    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint("weights/fit_end.ckpt")


class SaveAtTeardown(Callback):
    def teardown(self, trainer, pl_module, stage):
        if stage == "fit":
            trainer.save_checkpoint("weights/teardown.ckpt", weights_only=True)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(24)
        self.hidden = nn.Linear(24, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        x = F.gelu(self.norm(self.embed(x)))
        x = x + F.gelu(self.hidden(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


data = TensorDataset(torch.randn(80, 12), torch.randint(0, 4, (80,)))
model = Classifier()
trainer = pl.Trainer(max_epochs=2, callbacks=[SaveAtSetup(), SaveAtFitEnd(), SaveAtTeardown()])
trainer.fit(model, DataLoader(data, batch_size=10, shuffle=True))

initial = torch.load("weights/initial.pt")
fit_end = torch.load("weights/fit_end.ckpt", weights_only=False)
teardown = torch.load("weights/teardown.ckpt", weights_only=False)
result_keys = sorted(fit_end["state_dict"])
result_step = fit_end["global_step"]
result_moved = {k: (fit_end["state_dict"][k] - v).norm().item() for k, v in initial.items()}
result_equal = all(torch.equal(v, teardown["state_dict"][k]) for k, v in fit_end["state_dict"].items())
