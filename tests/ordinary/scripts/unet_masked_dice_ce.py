"""A small U-Net with skip connections, deep supervision and a masked Dice + CE loss (nnU-Net-like)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(12345)


class Volumes(Dataset):
    """Images, label maps, and a mask of what was annotated."""

    def __init__(self, n):
        self.images = torch.randn(n, 2, 16, 16)
        smooth = F.avg_pool2d(self.images, 5, 1, 2)
        self.labels = (smooth[:, 0] > 0).long() + (smooth[:, 1] > 0.1).long()
        self.valid = torch.rand(n, 16, 16) > 0.2

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"data": self.images[i], "target": self.labels[i], "valid": self.valid[i]}


class DoubleConv(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.InstanceNorm2d(c_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
            nn.InstanceNorm2d(c_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )

    def forward(self, x):
        return self.block(x)


class UNet(nn.Module):
    def __init__(self, c_in, n_classes, width=8):
        super().__init__()
        self.down1 = DoubleConv(c_in, width)
        self.down2 = DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.dec2 = DoubleConv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.dec1 = DoubleConv(2 * width, width)
        self.seg1 = nn.Conv2d(width, n_classes, 1)
        self.seg2 = nn.Conv2d(2 * width, n_classes, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(self.pool(d1))
        b = self.bottom(self.pool(d2))
        u2 = self.dec2(torch.cat([self.up2(b), d2], dim=1))
        u1 = self.dec1(torch.cat([self.up1(u2), d1], dim=1))
        return [self.seg1(u1), self.seg2(u2)]


class MaskedDiceCE(nn.Module):
    def __init__(self, batch_dice=True, smooth=1e-5):
        super().__init__()
        self.batch_dice = batch_dice
        self.smooth = smooth

    def forward(self, logits, target, valid):
        mask = valid[:, None].float()
        probs = logits.softmax(1) * mask
        onehot = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).float() * mask
        axes = (0, 2, 3) if self.batch_dice else (2, 3)
        tp = (probs * onehot).sum(axes)
        dice = (2 * tp + self.smooth) / (probs.sum(axes) + onehot.sum(axes) + self.smooth)
        ce = F.cross_entropy(logits, target.masked_fill(~valid, 255), ignore_index=255)
        return ce - dice[..., 1:].mean()


class SegmentationTrainer(L.LightningModule):
    def __init__(self, n_classes=3, initial_lr=1e-2, weight_decay=3e-5, num_epochs=2):
        super().__init__()
        self.save_hyperparameters()
        self.network = UNet(2, n_classes)
        self.loss = MaskedDiceCE()
        self.ds_weights = [2 / 3, 1 / 3]
        self.all_dice = []

    def forward(self, x):
        return self.network(x)[0]

    def training_step(self, batch, batch_idx):
        outputs = self.network(batch["data"])
        targets = [batch["target"], batch["target"][:, ::2, ::2]]
        valids = [batch["valid"], batch["valid"][:, ::2, ::2]]
        loss = sum(w * self.loss(o, t, v) for w, o, t, v in zip(self.ds_weights, outputs, targets, valids, strict=True))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.all_dice = []

    def validation_step(self, batch, batch_idx):
        logits = self(batch["data"])
        pred = logits.argmax(1)
        for c in range(1, self.hparams.n_classes):
            p, t = (pred == c) & batch["valid"], (batch["target"] == c) & batch["valid"]
            self.all_dice.append((2 * (p & t).sum() / (p.sum() + t.sum()).clamp(min=1)).item())
        self.log("val_loss", self.loss(logits, batch["target"], batch["valid"]))

    def on_validation_epoch_end(self):
        self.log("val_dice", sum(self.all_dice) / len(self.all_dice), prog_bar=True)

    def configure_optimizers(self):
        h = self.hparams
        optimizer = torch.optim.SGD(
            self.network.parameters(), h.initial_lr, weight_decay=h.weight_decay, momentum=0.99, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=h.num_epochs, power=0.9)
        return [optimizer], [scheduler]


model = SegmentationTrainer()
trainer = L.Trainer(max_epochs=2, gradient_clip_val=12, log_every_n_steps=1)
trainer.fit(model, DataLoader(Volumes(40), batch_size=8, shuffle=True), DataLoader(Volumes(12), batch_size=4))
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_prediction = model(Volumes(2).images).argmax(1)
