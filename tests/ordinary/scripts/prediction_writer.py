"""Predictions written by a BasePredictionWriter, by batch and at the end (docs' inference page)."""

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(510)


class CustomWriter(BasePredictionWriter):
    def __init__(self, output_dir, write_interval):
        super().__init__(write_interval)
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(exist_ok=True)

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        torch.save(prediction, self.output_dir / f"batch_{dataloader_idx}_{batch_idx}.pt")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        torch.save(predictions, self.output_dir / f"predictions_{trainer.global_rank}.pt")
        torch.save(batch_indices, self.output_dir / f"batch_indices_{trainer.global_rank}.pt")


class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        return self.out(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        return {"probs": self(x).softmax(-1), "features": self.features(x)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y = torch.randn(84, 7), torch.randint(0, 2, (84,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
pred = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)

pred_writer = CustomWriter(output_dir="pred_path", write_interval="batch_and_epoch")
model = LitModel()
trainer = L.Trainer(max_epochs=2, callbacks=[pred_writer])
trainer.fit(model, train)
result_predictions = trainer.predict(model, pred, return_predictions=True)
trainer.strategy.barrier()  # each process has written its files

written = torch.load("pred_path/predictions_0.pt")
result_files = sorted(path.name for path in Path("pred_path").glob("*.pt"))
result_written = torch.cat([p["probs"] for p in written])
result_indices = torch.load("pred_path/batch_indices_0.pt")
