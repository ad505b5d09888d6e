"""self.all_gather of predictions at the end of validation and sync_dist logging (docs' communication page)."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(515)


class GathersPredictions(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.validation_step_outputs = []

    def forward(self, x):
        return self.head(self.conv(x)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        gathered = self.all_gather(loss.detach())
        self.log("train_loss_gathered", gathered.mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.validation_step_outputs.append((logits, y))
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, y), sync_dist=True)

    def on_validation_epoch_end(self):
        logits = torch.cat([p for p, _ in self.validation_step_outputs])
        labels = torch.cat([t for _, t in self.validation_step_outputs])
        gathered = self.all_gather({"logits": logits, "labels": labels})
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            flat = {k: v.reshape(-1).float().cpu().numpy() for k, v in gathered.items()}
            self.log("val_auc", roc_auc_score(flat["labels"], flat["logits"]), rank_zero_only=True)
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x = torch.randn(88, 2, 10)
y = (x.mean((1, 2)) > 0).float()
model = GathersPredictions()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(
    model,
    DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True),
    DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8),
)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
