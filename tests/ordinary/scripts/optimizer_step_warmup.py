"""optimizer_step overridden for a warm-up by hand, and optimizer_zero_grad with set_to_none (docs' recipes)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(500)


class WarmupModel(L.LightningModule):
    def __init__(self, lr=0.02, warmup=5):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(11, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU())
        self.out = nn.Linear(24, 2)
        self.lrs = []

    def forward(self, x):
        return self.out(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    # learning rate warm-up
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        # update params
        optimizer.step(closure=optimizer_closure)

        # manually warm up lr without a scheduler
        if self.trainer.global_step < self.hparams.warmup:
            lr_scale = min(1.0, float(self.trainer.global_step + 1) / self.hparams.warmup)
            for pg in optimizer.param_groups:
                pg["lr"] = lr_scale * self.hparams.lr
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


data = TensorDataset(torch.randn(64, 11), torch.randint(0, 2, (64,)))
model = WarmupModel()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
result_lrs = model.lrs
result_loss = trainer.callback_metrics["loss"].item()
