"""BYOL with a momentum encoder updated by a callback in on_train_batch_end (lightning-bolts' BYOL)."""

import copy
import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(1234)


class BYOLMAWeightUpdate(Callback):
    """Weight update rule from Bootstrap Your Own Latent: the target follows the online network."""

    def __init__(self, initial_tau=0.996):
        super().__init__()
        self.initial_tau = initial_tau
        self.current_tau = initial_tau

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        online_net = pl_module.online_network
        target_net = pl_module.target_network
        # update weights
        self.update_weights(online_net, target_net)
        # update tau after
        self.update_tau(pl_module, trainer)

    def update_tau(self, pl_module, trainer):
        max_steps = len(trainer.train_dataloader) * trainer.max_epochs
        self.current_tau = 1 - (1 - self.initial_tau) * (math.cos(math.pi * pl_module.global_step / max_steps) + 1) / 2

    def update_weights(self, online_net, target_net):
        for online_p, target_p in zip(online_net.parameters(), target_net.parameters(), strict=True):
            target_p.data = self.current_tau * target_p.data + (1.0 - self.current_tau) * online_p.data


class MLP(nn.Module):
    def __init__(self, input_dim, hidden_size=24, output_dim=12):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_dim, hidden_size, bias=False),
            nn.BatchNorm1d(hidden_size),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_size, output_dim, bias=True),
        )

    def forward(self, x):
        return self.model(x)


class SiameseArm(nn.Module):
    def __init__(self, in_dim=20):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, 32), nn.ReLU(), nn.Linear(32, 16))
        self.projector = MLP(16)
        self.predictor = MLP(12)

    def forward(self, x):
        y = self.encoder(x)
        z = self.projector(y)
        h = self.predictor(z)
        return y, z, h


class BYOL(pl.LightningModule):
    def __init__(self, learning_rate=0.05, weight_decay=1.5e-6):
        super().__init__()
        self.save_hyperparameters()
        self.online_network = SiameseArm()
        self.target_network = copy.deepcopy(self.online_network)
        for p in self.target_network.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.online_network(x)[0]

    def cosine_loss(self, view1, view2):
        _, _, h1 = self.online_network(view1)
        with torch.no_grad():
            _, z2, _ = self.target_network(view2)
        return 2 - 2 * F.cosine_similarity(h1, z2.detach()).mean()

    def shared_step(self, batch, batch_idx):
        (view1, view2), _ = batch[:2], batch[2]
        loss_a = self.cosine_loss(view1, view2)
        loss_b = self.cosine_loss(view2, view1)
        return loss_a, loss_b, loss_a + loss_b

    def training_step(self, batch, batch_idx):
        loss_a, loss_b, total_loss = self.shared_step(batch, batch_idx)
        self.log_dict({"1_2_loss": loss_a, "2_1_loss": loss_b, "train_loss": total_loss})
        return total_loss

    def validation_step(self, batch, batch_idx):
        loss_a, loss_b, total_loss = self.shared_step(batch, batch_idx)
        self.log_dict({"val_1_2_loss": loss_a, "val_2_1_loss": loss_b, "val_loss": total_loss})
        return total_loss

    def configure_optimizers(self):
        return torch.optim.SGD(
            self.online_network.parameters(), lr=self.hparams.learning_rate, momentum=0.9, weight_decay=1.5e-6
        )


x = torch.randn(80, 20)
view_1, view_2 = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
data = TensorDataset(view_1, view_2, torch.zeros(80))
train, val = torch.utils.data.random_split(data, [64, 16])

model = BYOL()
trainer = pl.Trainer(max_epochs=2, callbacks=[BYOLMAWeightUpdate(0.9)], log_every_n_steps=2)
trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
results = trainer.validate(model, DataLoader(val, batch_size=16))
result_target = model.target_network.encoder[0].weight.detach().clone()
