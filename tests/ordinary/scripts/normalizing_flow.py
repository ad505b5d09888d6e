"""RealNVP on two moons, likelihood as loss, a backbone of coupling layers kept in a ModuleList (flow tutorials)."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(527)


class Coupling(nn.Module):
    def __init__(self, flip, hidden=24):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, x, log_det):
        a, b = x.chunk(2, dim=-1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=-1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        out = torch.cat([b, a] if self.flip else [a, b], dim=-1)
        return out, log_det + s.sum(-1)


class Flow(pl.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(flip=i % 2 == 1) for i in range(depth)])
        self.register_buffer("loc", torch.zeros(2))

    def forward(self, x):
        log_det = torch.zeros(len(x), device=x.device)
        for coupling in self.couplings:
            x, log_det = coupling(x, log_det)
        return x, log_det

    def log_prob(self, x):
        z, log_det = self(x)
        prior = torch.distributions.Normal(self.loc, torch.ones_like(self.loc))
        return prior.log_prob(z).sum(-1) + log_det

    def training_step(self, batch, batch_idx):
        loss = -self.log_prob(batch[0]).mean()
        self.log("nll", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_nll", -self.log_prob(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


points = torch.tensor(make_moons(120, noise=0.05, random_state=0)[0], dtype=torch.float32)
model = Flow()
trainer = pl.Trainer(max_epochs=2, gradient_clip_val=5.0, log_every_n_steps=1, logger=False)
trainer.fit(model, DataLoader(TensorDataset(points[:96]), batch_size=12, shuffle=True))
results = trainer.test(model, DataLoader(TensorDataset(points[96:]), batch_size=12))
with torch.no_grad():
    result_log_prob = model.log_prob(points[:5])
