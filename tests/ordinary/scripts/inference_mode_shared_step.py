"""Segmentation with a shared step whose metrics are computed under torch.inference_mode() (house style of a team)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(64)


def conv_bn(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU())


class SegModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(conv_bn(1, 8), nn.MaxPool2d(2), conv_bn(8, 16))
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), conv_bn(16, 8))
        self.segmentation_head = nn.Conv2d(8, 1, 1)
        self.loss_fn = nn.BCEWithLogitsLoss()
        self.stats = {"train": [], "valid": []}

    def forward(self, x):
        return self.segmentation_head(self.decoder(self.encoder(x)))

    def shared_step(self, batch, stage):
        image, mask = batch
        logits = self(image)
        loss = self.loss_fn(logits, mask)
        with torch.inference_mode():
            pred = logits.sigmoid() > 0.5
            inter = (pred & mask.bool()).sum((1, 2, 3))
            union = (pred | mask.bool()).sum((1, 2, 3))
            self.stats[stage].append((inter, union))
        self.log(f"{stage}_loss", loss, prog_bar=True)
        return loss

    def shared_epoch_end(self, stage):
        inter = torch.cat([s[0] for s in self.stats[stage]])
        union = torch.cat([s[1] for s in self.stats[stage]])
        self.log(f"{stage}_iou", (inter.sum() / union.sum().clamp(min=1)).item())
        self.stats[stage].clear()

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "valid")

    def on_train_epoch_end(self):
        self.shared_epoch_end("train")

    def on_validation_epoch_end(self):
        self.shared_epoch_end("valid")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


images = torch.randn(72, 1, 16, 16)
masks = (nn.functional.avg_pool2d(images, 3, 1, 1) > 0.1).float()
train = DataLoader(TensorDataset(images[:56], masks[:56]), batch_size=8, shuffle=True)
valid = DataLoader(TensorDataset(images[56:], masks[56:]), batch_size=8)
model = SegModel()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1, inference_mode=True)
trainer.fit(model, train, valid)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
results = trainer.validate(model, valid)
