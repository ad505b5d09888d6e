"""Deep copies and pickles of trainer, strategy and callbacks, before and after fit; a copy is gone on with."""

import copy
import pickle

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def copies(trainer):
    for part in (trainer, trainer.strategy, trainer.callbacks):
        yield copy.deepcopy(part)
        yield pickle.loads(pickle.dumps(part))


L.seed_everything(5)
loader = DataLoader(torch.randn(20, 6), batch_size=5)
model = Regression()
trainer = L.Trainer(max_epochs=1, callbacks=[ModelCheckpoint(dirpath="kept", monitor="val_loss")])
result_before = [type(one).__name__ for one in copies(trainer)][:2]
trainer = copy.deepcopy(trainer)
trainer.fit(model, loader, loader)
result_after = [type(one).__name__ for one in copies(trainer)][:2]
again = copy.deepcopy(trainer)
results = again.validate(model, loader)
again.fit_loop.max_epochs = 2
again.fit(model, loader, loader)
