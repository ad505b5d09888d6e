"""Several heads and losses on one trunk, weighed by learned uncertainties (multi-task blog posts)."""

from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

L.seed_everything(88)


class FaceBatch(NamedTuple):
    image: Tensor
    age: Tensor
    gender: Tensor
    ethnicity: Tensor


class Faces(Dataset):
    def __init__(self, n):
        self.image = torch.randn(n, 1, 12, 12)
        self.age = torch.rand(n)
        self.gender = torch.randint(0, 2, (n,)).float()
        self.ethnicity = torch.randint(0, 4, (n,))

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return FaceBatch(self.image[i], self.age[i], self.gender[i], self.ethnicity[i])


class MultiTask(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 9, 24),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict({"age": nn.Linear(24, 1), "gender": nn.Linear(24, 1), "ethnicity": nn.Linear(24, 4)})
        self.log_vars = nn.Parameter(torch.zeros(3))
        self.val_metrics = nn.ModuleDict(
            {"age": MeanAbsoluteError(), "gender": BinaryAUROC(), "ethnicity": MulticlassAccuracy(4)}
        )

    def forward(self, image):
        h = self.trunk(image)
        return {name: head(h).squeeze(-1) for name, head in self.heads.items()}

    def losses(self, out, batch):
        return torch.stack(
            [
                F.mse_loss(out["age"], batch.age),
                F.binary_cross_entropy_with_logits(out["gender"], batch.gender),
                F.cross_entropy(out["ethnicity"], batch.ethnicity),
            ]
        )

    def training_step(self, batch, batch_idx):
        losses = self.losses(self(batch.image), batch)
        total = (torch.exp(-self.log_vars) * losses + self.log_vars).sum()
        for name, value in zip(self.heads, losses, strict=True):
            self.log(f"train_{name}", value)
        self.log("train_total", total, prog_bar=True)
        return total

    def validation_step(self, batch, batch_idx):
        out = self(batch.image)
        self.val_metrics["age"](out["age"], batch.age)
        self.val_metrics["gender"](out["gender"].sigmoid(), batch.gender.int())
        self.val_metrics["ethnicity"](out["ethnicity"], batch.ethnicity)
        for name, metric in self.val_metrics.items():
            self.log(f"val_{name}", metric)
        self.log("val_total", self.losses(out, batch).sum(), batch_size=len(batch.image))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(
            [
                {"params": self.trunk.parameters(), "lr": 1e-3},
                {"params": self.heads.parameters(), "lr": 5e-3},
                {"params": [self.log_vars], "lr": 1e-2, "weight_decay": 0.0},
            ]
        )
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


model = MultiTask()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(Faces(60), batch_size=10, shuffle=True), DataLoader(Faces(20), batch_size=10))
results = trainer.validate(model, DataLoader(Faces(20), batch_size=10))
result_log_vars = model.log_vars.detach()
