"""A metric among the saved hyper-parameters, copied in hooks and pickled with every checkpoint."""

import copy
import pickle

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

L.seed_everything(5)


class Classifier(L.LightningModule):
    def __init__(self, metric, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.metric = metric
        self.scores = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.history = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.metric.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        kept = copy.deepcopy(self.metric)
        self.history.append(kept)
        again = pickle.loads(pickle.dumps(kept))
        self.log("train_acc", again.compute())
        self.metric.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores(self.net(x), y)
        self.log_dict(self.scores)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def loader(n, **kwargs):
    return DataLoader(TensorDataset(torch.randn(n, 6), torch.randint(0, 3, (n,))), batch_size=8, **kwargs)


model = Classifier(MulticlassAccuracy(3))
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, loader(48, shuffle=True), loader(16))
result_history = [metric.compute().item() for metric in model.history]
restored = Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)
restored.metric.update(torch.eye(3), torch.arange(3))
result_restored = restored.metric.compute().item()
