"""A callback gives up in the middle of an epoch; the run leaves a checkpoint, and the script goes on with the model."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(17)


class EnoughError(RuntimeError):
    pass


class GivesUp(L.Callback):
    left = 6

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.left -= 1
        if self.left == 0:
            raise EnoughError(f"after batch {batch_idx}")


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


x = torch.randn(40, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5)
model = Regression()
kept = ModelCheckpoint(dirpath="kept", filename="{step}", save_on_exception=True)
trainer = L.Trainer(max_epochs=2, callbacks=[GivesUp(), kept], log_every_n_steps=1)
result_error = "none"
try:
    trainer.fit(model, loader, loader)
except EnoughError as error:
    result_error = str(error)
trainer.save_checkpoint("by_hand.ckpt")
results = trainer.validate(model, loader)
trainer.fit(model, loader, loader)
result_after = trainer.validate(model, loader)
