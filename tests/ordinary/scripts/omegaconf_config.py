"""Everything built from an OmegaConf config with hydra's instantiate (the lightning-hydra-template), no seed set."""

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

cfg = OmegaConf.create(
    """
net:
  _target_: torch.nn.Sequential
  _args_:
    - {_target_: torch.nn.Linear, in_features: 10, out_features: 24}
    - {_target_: torch.nn.BatchNorm1d, num_features: 24}
    - {_target_: torch.nn.ReLU}
    - {_target_: torch.nn.Linear, in_features: 24, out_features: 24}
    - {_target_: torch.nn.BatchNorm1d, num_features: 24}
    - {_target_: torch.nn.ReLU}
    - {_target_: torch.nn.Linear, in_features: 24, out_features: 3}
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.005, weight_decay: 0.0}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 10}
callbacks:
  - {_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/acc, mode: max, save_last: true}
  - {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/acc, patience: 100, mode: max}
  - {_target_: lightning.pytorch.callbacks.RichModelSummary, max_depth: -1}
logger: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: csv}
"""
)


class MNISTLitModule(L.LightningModule):
    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        # this line allows to access init params with 'self.hparams' attribute
        # also ensures init params will be stored in ckpt
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=3)
        self.val_acc = Accuracy(task="multiclass", num_classes=3)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        # by default lightning executes validation step sanity checks before training starts,
        # so it's worth to make sure validation metrics don't store results from these checks
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        loss = self.criterion(logits, y)
        preds = torch.argmax(logits, dim=1)
        return loss, preds, y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        acc = self.val_acc.compute()  # get current val acc
        self.val_acc_best(acc)  # update best so far val acc
        # log `val_acc_best` as a value through `.compute()` method, instead of as a metric object
        # otherwise metric would be reset by lightning after each epoch
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": scheduler,
                    "monitor": "val/loss",
                    "interval": "epoch",
                    "frequency": 1,
                },
            }
        return {"optimizer": optimizer}


x, y = torch.randn(90, 10), torch.randint(0, 3, (90,))
train = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=10, shuffle=True)
val = DataLoader(TensorDataset(x[60:], y[60:]), batch_size=10)
model = MNISTLitModule(
    net=instantiate(cfg.net), optimizer=instantiate(cfg.optimizer), scheduler=instantiate(cfg.scheduler)
)
trainer = L.Trainer(
    max_epochs=2, callbacks=[instantiate(c) for c in cfg.callbacks], logger=instantiate(cfg.logger), log_every_n_steps=3
)
trainer.fit(model, train, val)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
