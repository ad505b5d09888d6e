"""A VAE with a KL term, sampled with rsample (lightning-bolts' VAE)."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(1234)


class VAE(L.LightningModule):
    def __init__(self, input_dim=64, enc_out_dim=16, kl_coeff=0.1, latent_dim=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.kl_coeff = kl_coeff
        self.encoder = nn.Sequential(
            nn.Linear(input_dim, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, enc_out_dim)
        )
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, input_dim))
        self.fc_mu = nn.Linear(enc_out_dim, latent_dim)
        self.fc_var = nn.Linear(enc_out_dim, latent_dim)

    def forward(self, x):
        x = self.encoder(x)
        mu = self.fc_mu(x)
        log_var = self.fc_var(x)
        _p, _q, z = self.sample(mu, log_var)
        return self.decoder(z)

    def _run_step(self, x):
        x = self.encoder(x)
        mu = self.fc_mu(x)
        log_var = self.fc_var(x)
        p, q, z = self.sample(mu, log_var)
        return z, self.decoder(z), p, q

    def sample(self, mu, log_var):
        std = torch.exp(log_var / 2)
        p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
        q = torch.distributions.Normal(mu, std)
        z = q.rsample()
        return p, q, z

    def step(self, batch, batch_idx):
        x, _y = batch
        _z, x_hat, p, q = self._run_step(x)
        recon_loss = F.mse_loss(x_hat, x, reduction="mean")
        kl = torch.distributions.kl_divergence(q, p)
        kl = kl.mean()
        kl *= self.kl_coeff
        loss = kl + recon_loss
        logs = {"recon_loss": recon_loss, "kl": kl, "loss": loss}
        return loss, logs

    def training_step(self, batch, batch_idx):
        loss, logs = self.step(batch, batch_idx)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logs = self.step(batch, batch_idx)
        self.log_dict({f"val_{k}": v for k, v in logs.items()})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


x = torch.rand(96, 64)
y = torch.zeros(96)
model = VAE()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(
    model,
    DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10, shuffle=True),
    DataLoader(TensorDataset(x[80:], y[80:]), batch_size=8),
)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
with torch.no_grad():
    result_decoded = model.decoder(torch.zeros(1, 6))
