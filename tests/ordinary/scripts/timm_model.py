"""A timm backbone with drop path and timm's own scheduler and loss in a LightningModule (timm users' style)."""

import lightning as L
import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

L.seed_everything(31)


class TimmClassifier(L.LightningModule):
    def __init__(self, name, num_classes, lr=1e-3, epochs=2, **model_kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, pretrained=False, num_classes=num_classes, **model_kwargs)
        self.criterion = LabelSmoothingCrossEntropy(smoothing=0.1)
        self.val_acc = Accuracy(task="multiclass", num_classes=num_classes)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val/acc", self.val_acc, on_epoch=True)
        self.log("val/loss", self.criterion(logits, y), on_epoch=True)

    def configure_optimizers(self):
        optimizer = create_optimizer_v2(self.model, opt="adamw", lr=self.hparams.lr, weight_decay=0.05)
        scheduler = CosineLRScheduler(optimizer, t_initial=self.hparams.epochs, warmup_t=1, warmup_lr_init=1e-5)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)  # timm's scheduler need the epoch value


x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 4, (64,))
train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
model = TimmClassifier(
    "vit_tiny_patch16_224", num_classes=4, img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3
)
trainer = L.Trainer(max_epochs=2, log_every_n_steps=3)
trainer.fit(model, train, val)
result_val = trainer.validate(model, val)
result_lr = trainer.optimizers[0].param_groups[0]["lr"]
