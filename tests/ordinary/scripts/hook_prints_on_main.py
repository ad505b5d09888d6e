"""The norms of weights, logged batch by batch; the main process prints some of them as well."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Watched(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 20), nn.GELU())
        self.head = nn.Linear(20, 3)
        self.history = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x)), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero and batch_idx % 2 == 0:
            self.print(f"head {self.head.weight.norm().item():.4f}, loss {outputs['loss'].item():.4f}")
        norms = {name: parameter.norm().item() for name, parameter in self.named_parameters()}
        self.history.append((sum(norms.values()), self.head.bias.norm().item()))
        self.log("norm", max(norms.values()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(5)
data = TensorDataset(torch.randn(48, 10), torch.randint(0, 3, (48,)))
model = Watched()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
result_history = model.history
