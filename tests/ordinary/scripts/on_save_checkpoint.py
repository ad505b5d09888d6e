"""on_save_checkpoint/on_load_checkpoint in the module, state_dict of a callback and of the DataModule."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(513)


class CountsSamples(Callback):
    def __init__(self):
        self.samples = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.samples += len(batch[0])

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state_dict):
        self.samples = state_dict["samples"]


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.times_loaded = 0
        self.data = TensorDataset(torch.randn(56, 6), torch.randint(0, 3, (56,)))

    def train_dataloader(self):
        self.times_loaded += 1
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def state_dict(self):
        return {"times_loaded": self.times_loaded}

    def load_state_dict(self, state_dict):
        self.times_loaded = state_dict["times_loaded"]


class WithVocabulary(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.vocabulary = {}
        self.history = []
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("running_mean", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.running_mean.mul_(0.9).add_(0.1 * x.mean(0))
        for label in y.tolist():
            self.vocabulary[label] = self.vocabulary.get(label, 0) + 1
        loss = F.cross_entropy(self.net(x - self.running_mean), y)
        self.history.append(loss.item())
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["vocabulary"] = dict(sorted(self.vocabulary.items()))
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint):
        self.vocabulary = checkpoint["vocabulary"]
        self.history = list(checkpoint["history"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


counter, data = CountsSamples(), Data()
model = WithVocabulary()
trainer = L.Trainer(max_epochs=1, callbacks=[counter])
trainer.fit(model, datamodule=data)
trainer.save_checkpoint("state.ckpt")

again = WithVocabulary()
second_counter = CountsSamples()
trainer = L.Trainer(max_epochs=2, callbacks=[second_counter])
trainer.fit(again, datamodule=data, ckpt_path="state.ckpt")
result_vocabulary = again.vocabulary
result_history = again.history
result_samples = (counter.samples, second_counter.samples)
result_mean = again.running_mean.clone()
result_keys = sorted(torch.load("state.ckpt", weights_only=False))
