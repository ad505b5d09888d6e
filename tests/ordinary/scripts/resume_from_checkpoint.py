"""Training stopped after an epoch and resumed from its checkpoint with a new trainer (docs' checkpointing page)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(508)


class LitModel(L.LightningModule):
    def __init__(self, hidden=20):
        super().__init__()
        self.save_hyperparameters()
        self.layer_1 = nn.Linear(12, hidden)
        self.layer_2 = nn.Linear(hidden, hidden)
        self.layer_3 = nn.Linear(hidden, hidden)
        self.layer_4 = nn.Linear(hidden, 4)

    def forward(self, x):
        x = F.relu(self.layer_1(x))
        x = F.relu(self.layer_2(x))
        x = F.relu(self.layer_3(x))
        return self.layer_4(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


x, y = torch.randn(80, 12), torch.randint(0, 4, (80,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)

model = LitModel()
checkpoint = ModelCheckpoint(dirpath="ckpts", filename="{epoch}", save_last=True, every_n_epochs=1, save_top_k=-1)
trainer = L.Trainer(max_epochs=1, callbacks=[checkpoint], logger=CSVLogger("first"))
trainer.fit(model, train, val)
result_after_first = trainer.callback_metrics["val_loss"].item()

# the machine was needed for something else; go on
resumed = LitModel.load_from_checkpoint("ckpts/last.ckpt")
trainer = L.Trainer(max_epochs=2, logger=CSVLogger("second"))
trainer.fit(resumed, train, val, ckpt_path="ckpts/last.ckpt")
result_resumed = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_steps = trainer.global_step
result_lr = trainer.optimizers[0].param_groups[0]["lr"]
results = trainer.validate(resumed, val)
