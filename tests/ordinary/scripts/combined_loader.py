"""Training on a labelled and an unlabelled loader by CombinedLoader, validation on two (semi-supervised, FixMatch)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(517)


class FixMatch(L.LightningModule):
    def __init__(self, threshold=0.4, lambda_u=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"]
        (weak, strong) = batch["unlabelled"]
        logits_x = self(x)
        loss_x = F.cross_entropy(logits_x, y)
        with torch.no_grad():
            probs = self(weak).softmax(-1)
            confidence, pseudo = probs.max(-1)
            mask = (confidence > self.hparams.threshold).float()
        loss_u = (F.cross_entropy(self(strong), pseudo, reduction="none") * mask).mean()
        loss = loss_x + self.hparams.lambda_u * loss_u
        self.log_dict({"loss_x": loss_x, "loss_u": loss_u, "mask": mask.mean()}, batch_size=len(x))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        name = ["clean", "noisy"][dataloader_idx]
        logits = self(x)
        self.log(f"{name}_acc", (logits.argmax(1) == y).float().mean(), add_dataloader_idx=False)
        self.log(f"{name}_loss", F.cross_entropy(logits, y), add_dataloader_idx=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True)


centres = 2 * torch.randn(3, 12)
y = torch.randint(0, 3, (136,))
x = centres[y] + torch.randn(136, 12)
unlabelled = x[32:96]
train = CombinedLoader(
    {
        "labelled": DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8, shuffle=True),
        "unlabelled": DataLoader(
            TensorDataset(unlabelled + 0.05 * torch.randn(64, 12), unlabelled + 0.5 * torch.randn(64, 12)),
            batch_size=8,
            shuffle=True,
        ),
    },
    mode="max_size_cycle",
)
val = [
    DataLoader(TensorDataset(x[96:], y[96:]), batch_size=8),
    DataLoader(TensorDataset(x[96:] + torch.randn(40, 12), y[96:]), batch_size=20),
]
model = FixMatch()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, train, val)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
results = trainer.validate(model, val)
