"""training_step returns None for batches with nothing to learn from (detection / metric learning style)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Timer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(100)


class SkipsBatches(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, 1)
        self.skipped = 0

    def forward(self, x):
        return self.head(self.backbone(x)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y, labelled = batch
        if labelled.sum() < 4:
            # not enough labels in this batch
            self.skipped += 1
            return None
        loss = F.binary_cross_entropy_with_logits(self(x)[labelled], y[labelled])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_loss", F.binary_cross_entropy_with_logits(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


x = torch.randn(80, 10)
y = (x.sum(dim=1) > 0).float()
labelled = torch.rand(80) < 0.5
labelled[16:24] = False
data = TensorDataset(x, y, labelled)
model = SkipsBatches()
timer = Timer(duration={"minutes": 5})
trainer = L.Trainer(max_epochs=2, callbacks=[timer])
trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=20))
result_skipped = model.skipped
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
