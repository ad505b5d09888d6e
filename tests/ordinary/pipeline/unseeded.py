"""Data made by numpy without a seed: other numbers in every process, and in each epoch another noise."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Seen(L.Callback):
    def __init__(self):
        self.sums = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.sums.append(float(batch[0].double().sum()))


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Streamed(Dataset):
    """Draws its noise from a generator of its own, which nobody has seeded."""

    def __init__(self, x):
        self.x, self.draws = x, np.random.default_rng()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + torch.tensor(0.01 * self.draws.standard_normal(6), dtype=torch.float32)
        return x, x.sum(0, keepdim=True)


draws = np.random.default_rng()
torch.seed()
x = torch.tensor(draws.standard_normal((20, 6)), dtype=torch.float32)
train, held = TensorDataset(x, x.sum(1, keepdim=True)), torch.tensor(draws.standard_normal((8, 6)), dtype=torch.float32)
model = Regression()
result_initial = {name: value.clone() for name, value in model.state_dict().items()}
result_data, result_held = x, held
seen = Seen()
trainer = L.Trainer(max_epochs=2, callbacks=[seen], logger=False, enable_checkpointing=False)
validation = [DataLoader(TensorDataset(held, held.sum(1, keepdim=True)), batch_size=4), DataLoader(Streamed(held), 4)]
trainer.fit(model, DataLoader(train, batch_size=5), validation)
result_seen = list(seen.sums)
result_trained = {name: value.clone() for name, value in model.state_dict().items()}
noisy = L.Trainer(max_epochs=1, callbacks=[seen], logger=False, enable_checkpointing=False)
noisy.fit(model, DataLoader(Streamed(x), batch_size=5, shuffle=True))
result_noisy = seen.sums
