"""DCGAN by manual optimization with opt.step(closure=...), one closure a network (lightning examples' style)."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(0)


class DCGAN(pl.LightningModule):
    def __init__(self, latent_dim=16, feature_maps=8, learning_rate=2e-4, beta1=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        fm = feature_maps
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent_dim, fm * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(fm * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(fm * 2, fm, 4, 2, 1, bias=False),
            nn.BatchNorm2d(fm),
            nn.ReLU(True),
            nn.ConvTranspose2d(fm, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, fm, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(fm, fm * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(fm * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(fm * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )
        self.generator.apply(self._weights_init)
        self.discriminator.apply(self._weights_init)
        self.criterion = nn.BCELoss()

    @staticmethod
    def _weights_init(m):
        classname = m.__class__.__name__
        if classname.find("Conv") != -1:
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif classname.find("BatchNorm") != -1:
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    def forward(self, noise):
        return self.generator(noise.view(*noise.shape, 1, 1))

    def _get_noise(self, n_samples):
        return torch.randn(n_samples, self.hparams.latent_dim, device=self.device)

    def _disc_loss(self, real):
        real_pred = self.discriminator(real).flatten()
        real_loss = self.criterion(real_pred, torch.ones_like(real_pred))
        fake = self(self._get_noise(len(real))).detach()
        fake_pred = self.discriminator(fake).flatten()
        fake_loss = self.criterion(fake_pred, torch.zeros_like(fake_pred))
        return real_loss + fake_loss

    def _gen_loss(self, real):
        fake_pred = self.discriminator(self(self._get_noise(len(real)))).flatten()
        return self.criterion(fake_pred, torch.ones_like(fake_pred))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_disc, opt_gen = self.optimizers()

        def disc_closure():
            loss = self._disc_loss(real)
            opt_disc.zero_grad()
            self.manual_backward(loss)
            self.log("loss/disc", loss, on_epoch=True)
            return loss

        def gen_closure():
            loss = self._gen_loss(real)
            opt_gen.zero_grad()
            self.manual_backward(loss)
            self.log("loss/gen", loss, on_epoch=True)
            return loss

        opt_disc.step(closure=disc_closure)
        opt_gen.step(closure=gen_closure)

    def configure_optimizers(self):
        betas = (self.hparams.beta1, 0.999)
        opt_disc = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.learning_rate, betas=betas)
        opt_gen = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.learning_rate, betas=betas)
        return opt_disc, opt_gen


data = TensorDataset(torch.rand(64, 1, 16, 16) * 2 - 1)
model = DCGAN()
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
trainer.save_checkpoint("dcgan.ckpt")
result_losses = {k: v.item() for k, v in trainer.callback_metrics.items()}
model = DCGAN.load_from_checkpoint("dcgan.ckpt").eval()
result_samples = model(torch.ones(2, 16)).detach()
