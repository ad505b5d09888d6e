"""Adam with lookahead written by a user, whose step must have a closure (torch-optimizer style)."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(4)


class ExtrapolatedSGD(torch.optim.Optimizer):
    """Extragradient: look ahead with one gradient, step with the gradient found there."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        saved = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    saved.append((p, p.clone()))
                    p.add_(p.grad, alpha=-group["lr"])
        with torch.enable_grad():
            loss = closure()
        for p, old in saved:
            p.copy_(old)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 1)
        )
        self.calls = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.calls += 1
        loss = F.smooth_l1_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return ExtrapolatedSGD(self.parameters(), lr=0.1)


x = torch.randn(64, 8)
y = (x[:, :2].prod(dim=1, keepdim=True)).tanh()
model = Regressor()
trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=8))
result_calls = model.calls
result_loss = trainer.callback_metrics["train_loss"].item()
result_predictions = model.net(x[:5]).detach()
