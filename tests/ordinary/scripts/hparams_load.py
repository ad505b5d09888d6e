"""save_hyperparameters with nested config and load_from_checkpoint with overrides (docs' hyperparameters page)."""

import itertools
from argparse import Namespace

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(512)

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


class ConfiguredNet(pl.LightningModule):
    def __init__(self, in_dim, out_dim, hidden=(16, 16), act="relu", optimizer=None, loss_fn=F.mse_loss, **kwargs):
        super().__init__()
        self.save_hyperparameters(ignore=["loss_fn"])
        self.loss_fn = loss_fn
        dims = [in_dim, *hidden]
        layers = []
        for a, b in itertools.pairwise(dims):
            layers += [nn.Linear(a, b), ACTIVATIONS[act]()]
        self.layers = nn.Sequential(*layers, nn.Linear(dims[-1], out_dim))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss_fn(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        config = dict(self.hparams.optimizer or {"name": "Adam", "lr": 1e-3})
        return getattr(torch.optim, config.pop("name"))(self.parameters(), **config)


args = Namespace(in_dim=6, out_dim=2, hidden=(20, 20, 12), act="gelu", note="a run")
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].exp()), batch_size=8, shuffle=True)
model = ConfiguredNet(**vars(args), optimizer={"name": "SGD", "lr": 0.01, "momentum": 0.9})
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, loader)
trainer.save_checkpoint("configured.ckpt")

loaded = ConfiguredNet.load_from_checkpoint("configured.ckpt")
result_hparams = dict(loaded.hparams)
result_equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
changed = ConfiguredNet.load_from_checkpoint("configured.ckpt", act="tanh", map_location="cpu")
loaded.eval(), changed.eval()
result_outputs = loaded(x[:3]).detach()
result_changed = changed(x[:3]).detach()
result_yaml = sorted((trainer.logger.hparams or {}).keys())
