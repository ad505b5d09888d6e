"""Logging in every way: log_dict, on_step/on_epoch, prog_bar, reduce_fx, metrics by name, several val loaders."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric

L.seed_everything(503)


class LogsEverything(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.mean_loss = MeanMetric()
        self.epoch_acc = MeanMetric()
        self.best_acc = MaxMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        acc = (logits.argmax(1) == y).float().mean()
        self.mean_loss(loss)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        self.log("train/max_loss", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train/mean_loss", self.mean_loss, on_step=True, on_epoch=True)
        self.log_dict({"train/acc": acc, "train/errors": 1 - acc}, on_step=False, on_epoch=True, batch_size=len(x))
        if self.trainer.logger is not None and batch_idx == 0:
            self.logger.log_metrics({"first_logit": logits[0, 0].item()}, step=self.global_step)
        return {"loss": loss, "acc": acc.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("last_acc", outputs["acc"])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self.model(x)
        acc = (logits.argmax(1) == y).float().mean()
        if dataloader_idx == 0:
            self.epoch_acc.update(acc)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log(f"val_acc_{dataloader_idx}", acc, add_dataloader_idx=False, on_epoch=True)

    def on_validation_epoch_end(self):
        self.best_acc.update(self.epoch_acc.compute())
        self.epoch_acc.reset()
        self.log("best_acc", self.best_acc.compute(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=5e-3)


def loader(n, **kwargs):
    return DataLoader(TensorDataset(torch.randn(n, 8), torch.randint(0, 3, (n,))), batch_size=8, **kwargs)


model = LogsEverything()
trainer = L.Trainer(max_epochs=2, logger=CSVLogger("csv", name="all"), log_every_n_steps=3)
val_loaders = [loader(24), loader(20)]
trainer.fit(model, loader(60, shuffle=True), val_loaders)
result_logged = {k: v.item() for k, v in trainer.logged_metrics.items()}
result_callback = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_progress = dict(trainer.progress_bar_metrics)
results = trainer.validate(model, val_loaders)
