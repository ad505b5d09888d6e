"""What training_step returns, read batch by batch in hooks: a running accuracy, and a callback that collects logits."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(3)


class Tracked(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 4)
        self.seen, self.correct = 0, 0.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, y), "correct": (logits.argmax(1) == y).float().mean(), "logits": logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += len(batch[0])
        self.correct += outputs["correct"].item() * len(batch[0])
        self.log("running_acc", self.correct / self.seen, prog_bar=True)
        self.log("loss_again", outputs["loss"], on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class CollectLogits(L.Callback):
    def __init__(self):
        self.means, self.collected = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.collected.append(outputs["logits"].detach().cpu())
        self.means.append(float(outputs["logits"].mean()))

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("logit_std", torch.cat(self.collected).std())
        self.collected.clear()


class PrintsOnMain(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx % 2 == 0:
            trainer.progress_bar_callback.print(f"step {trainer.global_step}: {outputs['loss'].item():.3f}")


data = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
model, collect = Tracked(), CollectLogits()
trainer = L.Trainer(max_epochs=2, callbacks=[collect, PrintsOnMain()], accumulate_grad_batches=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
result_means = collect.means
result_correct = model.correct
