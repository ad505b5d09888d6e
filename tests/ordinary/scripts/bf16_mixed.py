"""precision="bf16-mixed" with a small ConvNeXt-like net, mixup in the training step, CSV logs (speed-minded users)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(519)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x):
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.gamma * self.mlp(self.norm(h))
        return x + h.permute(0, 3, 1, 2)


class MiniConvNeXt(L.LightningModule):
    def __init__(self, dim=16, depth=3, num_classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = 0.8
        mixed = lam * x + (1 - lam) * x.roll(1, 0)
        logits = self(mixed)
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y.roll(1, 0))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        no_decay = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-3
        )


x, y = torch.randn(80, 3, 16, 16), torch.randint(0, 4, (80,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
model = MiniConvNeXt()
trainer = L.Trainer(max_epochs=2, precision="bf16-mixed", logger=CSVLogger("csv"), gradient_clip_val=1.0)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
result_dtypes = sorted({str(p.dtype) for p in model.parameters()})
