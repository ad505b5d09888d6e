"""Barlow Twins, its loss from the batch's cross-correlation, an online linear probe beside it (PL's tutorial)."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(33)


class BarlowTwinsLoss(nn.Module):
    def __init__(self, batch_size, lambda_coeff=5e-3, z_dim=16):
        super().__init__()
        self.z_dim = z_dim
        self.batch_size = batch_size
        self.lambda_coeff = lambda_coeff

    def off_diagonal_ele(self, x):
        # taken from: https://github.com/facebookresearch/barlowtwins/blob/main/main.py
        # return a flattened view of the off-diagonal elements of a square matrix
        n, m = x.shape
        assert n == m
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def forward(self, z1, z2):
        # N x D, where N is the batch size and D is output dim of projection head
        z1_norm = (z1 - torch.mean(z1, dim=0)) / torch.std(z1, dim=0)
        z2_norm = (z2 - torch.mean(z2, dim=0)) / torch.std(z2, dim=0)
        cross_corr = torch.matmul(z1_norm.T, z2_norm) / self.batch_size
        on_diag = torch.diagonal(cross_corr).add_(-1).pow_(2).sum()
        off_diag = self.off_diagonal_ele(cross_corr).pow_(2).sum()
        return on_diag + self.lambda_coeff * off_diag


class ProjectionHead(nn.Module):
    def __init__(self, input_dim=24, hidden_dim=24, output_dim=16):
        super().__init__()
        self.projection_head = nn.Sequential(
            nn.Linear(input_dim, hidden_dim, bias=True),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, output_dim, bias=False),
        )

    def forward(self, x):
        return self.projection_head(x)


class BarlowTwins(L.LightningModule):
    def __init__(self, encoder, encoder_out_dim, batch_size, learning_rate=1e-3, warmup_epochs=1, max_epochs=3):
        super().__init__()
        self.encoder = encoder
        self.projection_head = ProjectionHead(input_dim=encoder_out_dim)
        self.loss_fn = BarlowTwinsLoss(batch_size=batch_size)
        self.learning_rate = learning_rate
        self.warmup_epochs = warmup_epochs

    def forward(self, x):
        return self.encoder(x)

    def shared_step(self, batch):
        x1, x2, _ = batch
        z1 = self.projection_head(self.encoder(x1))
        z2 = self.projection_head(self.encoder(x2))
        return self.loss_fn(z1, z2)

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("val_loss", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class OnlineFineTuner(Callback):
    def __init__(self, encoder_output_dim, num_classes):
        super().__init__()
        self.encoder_output_dim = encoder_output_dim
        self.num_classes = num_classes
        self.accuracies = []

    def on_fit_start(self, trainer, pl_module):
        # add linear_eval layer and optimizer
        pl_module.online_finetuner = nn.Linear(self.encoder_output_dim, self.num_classes).to(pl_module.device)
        self.optimizer = torch.optim.Adam(pl_module.online_finetuner.parameters(), lr=1e-3)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x1, _, y = batch
        with torch.no_grad():
            feats = pl_module(x1)
        feats = feats.detach()
        preds = pl_module.online_finetuner(feats)
        loss = F.cross_entropy(preds, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        acc = (preds.argmax(-1) == y).float().mean()
        self.accuracies.append(acc.item())
        pl_module.log("online_train_acc", acc, on_step=True, on_epoch=False)


x = torch.randn(72, 18)
data = TensorDataset(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x), torch.randint(0, 3, (72,)))
train, val = torch.utils.data.random_split(data, [48, 24])
encoder = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
model = BarlowTwins(encoder, encoder_out_dim=24, batch_size=12)
online_finetuner = OnlineFineTuner(encoder_output_dim=24, num_classes=3)
trainer = L.Trainer(max_epochs=2, callbacks=[online_finetuner], log_every_n_steps=1)
trainer.fit(
    model,
    DataLoader(train, batch_size=12, shuffle=True, drop_last=True),
    DataLoader(val, batch_size=12, drop_last=True),
)
result_loss = trainer.callback_metrics["val_loss"].item()
result_accuracies = online_finetuner.accuracies
