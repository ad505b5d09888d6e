"""Compiled in every way there is: a part that is wrapped, one that compiles itself, a method, and the whole model."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))


class Compiled(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(Block(), backend="eager")
        self.second = Block()
        self.second.compile(backend="eager")
        self.head = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.ReLU(), backend="eager"), nn.Linear(8, 1))
        self.loss = torch.compile(self.loss_of, backend="eager")

    def loss_of(self, y, target):
        return (y - target).pow(2).mean()

    def forward(self, x):
        return self.head(self.second(self.first(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


L.seed_everything(3)
x = torch.randn(24, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
model = Compiled()
trainer = L.Trainer(max_epochs=1)
trainer.fit(model, loader, loader)
whole = torch.compile(model, backend="eager")
again = L.Trainer(max_epochs=1)
again.fit(whole, loader, loader)
results = again.validate(whole, loader)
result_names = list(model.state_dict())
result_compiled = [
    hasattr(model.first.forward, "_torchdynamo_orig_callable"),
    model.second._compiled_call_impl is not None,
    hasattr(model.loss, "_torchdynamo_orig_callable"),
    model._compiler_ctx is not None and hasattr(model.training_step, "_torchdynamo_orig_callable"),
    "_pl_pipe_uncompiled" in vars(model.first),
]
with torch.no_grad():
    result_answer = model(x[:2])
