"""Copies of the model and of the callbacks after fit, by deepcopy and pickle (hyper-parameter search scripts)."""

import copy
import pickle

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(505)


class Classifier(L.LightningModule):
    def __init__(self, width=16, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


x, y = torch.randn(80, 10), torch.randint(0, 3, (80,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)

best_model, best_score, callbacks_of = None, float("inf"), {}
result_scores = {}
for width in (8, 16, 24):
    model = Classifier(width)
    callbacks = [EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_loss", dirpath=f"width{width}")]
    trainer = L.Trainer(max_epochs=2, callbacks=callbacks, logger=False, enable_progress_bar=False)
    trainer.fit(model, train, val)
    score = trainer.callback_metrics["val_loss"].item()
    result_scores[width] = score
    callbacks_of[width] = copy.deepcopy(trainer.callbacks)
    if score < best_score:
        best_score = score
        best_model = copy.deepcopy(model)

pickled = pickle.dumps(best_model)
unpickled = pickle.loads(pickled).eval()
result_width = best_model.hparams.width
with torch.no_grad():
    result_predictions = unpickled(x[:4])
result_best_scores = {
    width: callback.best_score.item()
    for width, saved in callbacks_of.items()
    for callback in saved
    if isinstance(callback, EarlyStopping)
}
