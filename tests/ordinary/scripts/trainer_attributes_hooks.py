"""Hooks and callbacks that look at the trainer: counts, progress, optimizers, loaders, state (debugging style)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(504)

events = []


class Inspector(Callback):
    def on_fit_start(self, trainer, pl_module):
        events.append(
            ("fit_start", trainer.state.fn.value, trainer.max_epochs, trainer.num_devices, trainer.world_size)
        )

    def on_train_start(self, trainer, pl_module):
        n_params = sum(p.numel() for p in pl_module.parameters())
        events.append(("params", n_params, trainer.num_training_batches, trainer.num_val_batches))
        events.append(("optimizers", [type(o).__name__ for o in trainer.optimizers]))
        events.append(("schedulers", [c.interval for c in trainer.lr_scheduler_configs]))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        events.append(("batch", trainer.current_epoch, trainer.global_step, batch_idx, trainer.is_last_batch))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        events.append(("loss", batch_idx, round(outputs["loss"].item(), 5), trainer.fit_loop.total_batch_idx))

    def on_validation_end(self, trainer, pl_module):
        events.append(("validated", trainer.sanity_checking, sorted(trainer.callback_metrics)))

    def on_train_epoch_end(self, trainer, pl_module):
        weights = {
            k: round(v.float().norm().item(), 5) for k, v in pl_module.state_dict().items() if k.endswith("weight")
        }
        events.append(("weights", trainer.current_epoch, weights))

    def on_exception(self, trainer, pl_module, exception):
        events.append(("exception", type(exception).__name__))


class Inspected(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.c = nn.Linear(16, 2)

    def forward(self, x):
        return self.c(self.b(self.a(x)))

    def on_train_start(self):
        self.total = self.trainer.estimated_stepping_batches
        self.device_type = self.device.type

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert self.training
        assert self.a[0].training
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        if self.trainer.global_step == 3:
            events.append(("lr", self.optimizers().param_groups[0]["lr"], self.lr_schedulers().last_epoch))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        assert not self.training
        assert not torch.is_grad_enabled()
        self.log("val_loss", F.cross_entropy(self(x), y))

    def on_train_batch_start(self, batch, batch_idx):
        # skip the rest of the second epoch
        if self.current_epoch == 1 and batch_idx == 4:
            return -1
        return None

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "linear"}]


x, y = torch.randn(72, 6), torch.randint(0, 2, (72,))
train = DataLoader(TensorDataset(x[:56], y[:56]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[56:], y[56:]), batch_size=8)
model = Inspected()
setup_call = LambdaCallback(setup=lambda trainer, pl_module, stage: events.append(("setup", str(stage))))
trainer = L.Trainer(max_epochs=2, callbacks=[Inspector(), setup_call], log_every_n_steps=1)
trainer.fit(model, train, val)
result_events = events
result_state = (trainer.state.finished, trainer.global_step, trainer.current_epoch, trainer.interrupted)
result_total = int(model.total)
