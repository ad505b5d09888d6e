"""Masked reconstruction of sensor series, the loss made by hand: (loss * mask).sum() / mask.sum() (MAE-like)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(55)


class MaskedReconstruction(L.LightningModule):
    def __init__(self, channels=5, width=24, mask_ratio=0.3):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.mask_token = nn.Parameter(torch.zeros(channels))
        self.embed = nn.Linear(channels, width)
        self.layer1 = nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.layer2 = nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, channels)

    def forward(self, series, hidden):
        x = torch.where(hidden.unsqueeze(-1), self.mask_token, series)
        x = self.embed(x)
        x = self.layer2(self.layer1(x))
        return self.head(x)

    def masked_loss(self, pred, target, mask):
        loss = (pred - target) ** 2
        loss = loss.mean(dim=-1)
        return (loss * mask).sum() / mask.sum()

    def training_step(self, batch, batch_idx):
        series, observed = batch
        # hide every third observed step, another third each batch
        steps = torch.arange(series.shape[1], device=self.device)
        hidden = ((steps + batch_idx) % 3 == 0).expand(series.shape[:2])
        pred = self(series, hidden)
        loss = self.masked_loss(pred, series, (hidden & observed).float())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        series, observed = batch
        hidden = torch.zeros_like(observed)
        hidden[:, ::4] = True
        pred = self(series, hidden)
        self.log("val_loss", self.masked_loss(pred, series, (hidden & observed).float()), batch_size=len(series))
        return pred

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


series = torch.randn(96, 15, 5).cumsum(dim=1) / 4
lengths = torch.randint(6, 16, (96, 1))
observed = torch.arange(15) < lengths
train = DataLoader(TensorDataset(series[:72], observed[:72]), batch_size=12, shuffle=True)
val = DataLoader(TensorDataset(series[72:], observed[72:]), batch_size=12)

model = MaskedReconstruction()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, train, val)
trainer.save_checkpoint("masked.ckpt")
result_metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
