"""WGAN-GP by manual optimization: several critic steps a generator step, a gradient penalty by autograd.grad."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(525)


class WGANGP(L.LightningModule):
    def __init__(self, latent_dim=4, n_critic=3, lambda_gp=10.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)
        )

    def forward(self, z):
        return self.generator(z)

    def compute_gradient_penalty(self, real, fake):
        alpha = torch.rand(len(real), 1, device=self.device)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = self.critic(interpolates)
        gradients = torch.autograd.grad(
            outputs=scores,
            inputs=interpolates,
            grad_outputs=torch.ones_like(scores),
            create_graph=True,
            retain_graph=True,
        )[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_c = self.optimizers()
        z = torch.randn(len(real), self.hparams.latent_dim, device=self.device)

        fake = self(z).detach()
        gp = self.compute_gradient_penalty(real, fake)
        c_loss = self.critic(fake).mean() - self.critic(real).mean() + self.hparams.lambda_gp * gp
        opt_c.zero_grad()
        self.manual_backward(c_loss)
        opt_c.step()
        self.log("c_loss", c_loss, prog_bar=True)

        if (batch_idx + 1) % self.hparams.n_critic == 0:
            self.toggle_optimizer(opt_g)
            g_loss = -self.critic(self(z)).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g_loss", g_loss, prog_bar=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return opt_g, opt_c


angles = torch.rand(108) * 2 * torch.pi
data = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
model = WGANGP()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=12, shuffle=True))
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_points = model(torch.linspace(-1, 1, 12).view(3, 4)).detach()
