"""Weights averaged at the end of an epoch, another average by steps, and a run that goes on from their checkpoint."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Normed(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trainer_with(callback, epochs, folder):
    kept = ModelCheckpoint(dirpath=folder, save_last=True, filename="{epoch}")
    return L.Trainer(max_epochs=epochs, callbacks=[callback, kept], logger=False)


L.seed_everything(8)
x = torch.randn(24, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
ema = EMAWeightAveraging(decay=0.8)
trainer_with(ema, 1, "first").fit(Normed(), loader, loader)
result_average = {name: value.clone() for name, value in ema._average_model.state_dict().items()}
model = Normed()
again = trainer_with(EMAWeightAveraging(decay=0.8), 2, "second")
again.fit(model, loader, loader, ckpt_path="first/last.ckpt")
by_group = Normed()
averaging = WeightAveraging(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.5))
trainer_with(averaging, 1, "third").fit(by_group, loader, loader)
results = again.validate(model, loader)
