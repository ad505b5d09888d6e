"""A small denoising diffusion model with time embeddings and sampling after training (diffusion tutorials)."""

import math

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(523)


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(1000) * torch.arange(half, device=t.device) / half)
        args = t[:, None].float() * freqs
        return self.mlp(torch.cat([args.sin(), args.cos()], dim=-1))


class ResBlock(nn.Module):
    def __init__(self, dim, t_dim):
        super().__init__()
        self.norm = nn.GroupNorm(4, dim)
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.time = nn.Linear(t_dim, dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x, temb):
        h = self.conv1(nn.functional.silu(self.norm(x)))
        h = h + self.time(temb)[:, :, None, None]
        return x + self.conv2(nn.functional.silu(h))


class Denoiser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.inp = nn.Conv2d(1, dim, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(dim, dim) for _ in range(3)])
        self.out = nn.Conv2d(dim, 1, 3, padding=1)

    def forward(self, x, t):
        temb = self.time(t)
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, temb)
        return self.out(h)


class DDPM(L.LightningModule):
    def __init__(self, timesteps=20):
        super().__init__()
        self.save_hyperparameters()
        self.model = Denoiser()
        betas = torch.linspace(1e-3, 0.2, timesteps)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_bar", torch.cumprod(1 - betas, 0))

    def q_sample(self, x0, t, noise):
        a = self.alphas_bar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def training_step(self, batch, batch_idx):
        (x0,) = batch
        t = torch.randint(0, self.hparams.timesteps, (len(x0),), device=self.device)
        noise = torch.randn_like(x0)
        loss = nn.functional.mse_loss(self.model(self.q_sample(x0, t, noise), t), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 1, 8, 8, device=self.device)
        for i in reversed(range(self.hparams.timesteps)):
            t = torch.full((n,), i, device=self.device)
            eps = self.model(x, t)
            beta, a_bar = self.betas[i], self.alphas_bar[i]
            x = (x - beta / (1 - a_bar).sqrt() * eps) / (1 - beta).sqrt()
            if i > 0:
                x = x + beta.sqrt() * torch.randn_like(x)
        return x

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12),
            ],
            milestones=[4],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


images = (torch.rand(64, 1, 8, 8) > 0.5).float() * 2 - 1
model = DDPM()
checkpoint = ModelCheckpoint(every_n_train_steps=8, save_top_k=-1)
trainer = L.Trainer(max_epochs=2, callbacks=[checkpoint], gradient_clip_val=1.0, log_every_n_steps=2)
trainer.fit(model, DataLoader(TensorDataset(images), batch_size=8, shuffle=True))
model.eval()
torch.manual_seed(0)
result_samples = model.sample(3)
result_loss = trainer.callback_metrics["train_loss"].item()
