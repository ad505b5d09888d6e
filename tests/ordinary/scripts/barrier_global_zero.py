"""is_global_zero, rank_zero_only, barrier and broadcast idioms around files (multi-GPU users' habits)."""

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(516)


@rank_zero_only
def write_report(path, metrics):
    Path(path).write_text(json.dumps(metrics))


class RankAware(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 20), nn.SELU(), nn.Linear(20, 20), nn.SELU(), nn.Linear(20, 20), nn.SELU()
        )
        self.out = nn.Linear(20, 1)

    def setup(self, stage):
        if stage == "fit":
            if self.trainer.is_global_zero:
                Path("reports").mkdir(exist_ok=True)
            self.trainer.strategy.barrier("reports")
            rank_zero_info("reports are there")
            self.run_name = self.trainer.strategy.broadcast("run-7" if self.global_rank == 0 else None)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.huber_loss(self.out(self.net(x)), y)
        self.log("train_loss", loss, rank_zero_only=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.huber_loss(self.out(self.net(x)), y), sync_dist=True)

    def on_validation_epoch_end(self):
        self.trainer.strategy.barrier()
        write_report(
            f"reports/{self.run_name}_{self.current_epoch}.json",
            {"rank": self.global_rank, "world": self.trainer.world_size},
        )

    def on_train_end(self):
        worst = self.trainer.strategy.reduce(torch.tensor(float(self.global_rank)), reduce_op="mean")
        self.worst_rank = worst.item()
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), "reports/final.pt")
        self.trainer.strategy.barrier()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


x = torch.randn(80, 10)
y = x[:, :1] * x[:, 1:2]
model = RankAware()
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(
    model,
    DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True),
    DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8),
)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
if trainer.is_global_zero:
    saved = torch.load("reports/final.pt")
    result_norms = {name: value.norm().item() for name, value in saved.items()}
    result_reports = sorted(path.name for path in Path("reports").glob("*.json"))
    result_report = json.loads(Path("reports/run-7_1.json").read_text())
