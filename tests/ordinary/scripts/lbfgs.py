"""LBFGS by automatic optimization on full batches (physics-informed and curve-fitting notebooks)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(314)


class CurveFit(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).double()

    def forward(self, t):
        return self.net(t)

    def training_step(self, batch, batch_idx):
        t, u = batch
        loss = nn.functional.mse_loss(self(t), u)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=6, history_size=5, line_search_fn="strong_wolfe")


t = torch.linspace(-1, 1, 48, dtype=torch.float64).unsqueeze(1)
u = torch.exp(-t) * torch.sin(4 * t)
model = CurveFit()
trainer = L.Trainer(max_epochs=6, log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(model, DataLoader(TensorDataset(t, u), batch_size=48))
result_loss = trainer.callback_metrics["loss"].item()
result_curve = model(t[::8]).detach()
