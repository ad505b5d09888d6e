"""StochasticWeightAveraging from the docs' advanced training techniques."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(44)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.model(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        return [optimizer], [scheduler]


x = torch.randn(96, 9)
y = x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(96, 1)
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)
model = Regressor()
trainer = L.Trainer(
    max_epochs=4,
    callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=0.5, annealing_epochs=1), LearningRateMonitor()],
    logger=TensorBoardLogger("tb_logs", name="swa"),
    log_every_n_steps=2,
)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
result_weight = model.model[0].weight.detach().clone()
