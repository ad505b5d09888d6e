"""A CLIP-like pair of encoders with a symmetric contrastive loss and a learned temperature, no seed set."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n):
        self.image = torch.randn(n, 3, 8, 8)
        self.text = torch.randint(1, 30, (n, 7))

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return {"image": self.image[i], "input_ids": self.text[i], "caption": f"caption number {i}"}


class ImageEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(32, dim), nn.GELU())

    def forward(self, x):
        return self.net(x)


class TextEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embedding = nn.Embedding(30, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        return self.encoder(self.embedding(ids))[:, 0]


class ProjectionHead(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.projection = nn.Linear(dim, out)
        self.fc = nn.Linear(out, out)
        self.layer_norm = nn.LayerNorm(out)

    def forward(self, x):
        projected = self.projection(x)
        return self.layer_norm(self.fc(F.gelu(projected)) + projected)


class CLIP(L.LightningModule):
    def __init__(self, dim=24, out=16):
        super().__init__()
        self.image_encoder, self.text_encoder = ImageEncoder(dim), TextEncoder(dim)
        self.image_projection, self.text_projection = ProjectionHead(dim, out), ProjectionHead(dim, out)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, batch):
        image = F.normalize(self.image_projection(self.image_encoder(batch["image"])), dim=-1)
        text = F.normalize(self.text_projection(self.text_encoder(batch["input_ids"])), dim=-1)
        return self.logit_scale.exp() * image @ text.t()

    def training_step(self, batch, batch_idx):
        logits = self(batch)
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        self.log("train_loss", loss, batch_size=len(logits))
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch)
        labels = torch.arange(len(logits), device=logits.device)
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), batch_size=len(logits))

    def configure_optimizers(self):
        return torch.optim.AdamW(
            [
                {"params": self.image_encoder.parameters(), "lr": 1e-3},
                {"params": self.text_encoder.parameters(), "lr": 5e-4},
                {"params": [*self.image_projection.parameters(), *self.text_projection.parameters()], "lr": 2e-3},
                {"params": [self.logit_scale], "lr": 1e-4, "weight_decay": 0.0},
            ]
        )


model = CLIP()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(Pairs(64), batch_size=8, shuffle=True), DataLoader(Pairs(16), batch_size=8))
trainer.save_checkpoint("clip.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
