"""Knowledge distillation: a frozen teacher in the module, temperature-scaled KL + CE (blog-post style)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import accuracy

L.seed_everything(13)


def mlp(width, depth):
    layers = [nn.Linear(14, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


class Teacher(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(32, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("teacher_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Distiller(L.LightningModule):
    def __init__(self, teacher, temperature=3.0, alpha=0.7):
        super().__init__()
        self.save_hyperparameters(ignore=["teacher"])
        self.teacher = teacher
        self.teacher.eval()
        self.teacher.requires_grad_(False)
        self.student = mlp(12, 2)

    def forward(self, x):
        return self.student(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            teacher_logits = self.teacher(x)
        student_logits = self.student(x)
        t = self.hparams.temperature
        kd = F.kl_div(
            F.log_softmax(student_logits / t, dim=-1), F.softmax(teacher_logits / t, dim=-1), reduction="batchmean"
        ) * (t * t)
        ce = F.cross_entropy(student_logits, y)
        loss = self.hparams.alpha * kd + (1 - self.hparams.alpha) * ce
        self.log_dict({"kd": kd, "ce": ce, "loss": loss}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_acc", accuracy(logits, y, task="multiclass", num_classes=5), on_epoch=True)
        agree = (logits.argmax(1) == self.teacher(x).argmax(1)).float().mean()
        self.log("val_agree", agree)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=5e-3)


x, y = torch.randn(96, 14), torch.randint(0, 5, (96,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)

teacher = Teacher()
trainer = L.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(teacher, train)
result_teacher_loss = trainer.callback_metrics["teacher_loss"].item()

distiller = Distiller(teacher)
trainer = L.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(distiller, train, val)
result_student = {k: v.item() for k, v in trainer.callback_metrics.items()}
