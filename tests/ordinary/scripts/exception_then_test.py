"""The user's own code raises in the middle of training; the script carries on with what there is and tests it."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(509)


class PatienceError(RuntimeError):
    pass


class GivesUp(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)
        )
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += 1
        if self.seen > 11:
            raise PatienceError(f"gave up at epoch {self.current_epoch}, batch {batch_idx}")
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log_dict({"test_loss": F.cross_entropy(logits, y), "test_acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


x, y = torch.randn(80, 8), torch.randint(0, 2, (80,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
test = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)

model = GivesUp()
trainer = L.Trainer(max_epochs=3, log_every_n_steps=1)
try:
    trainer.fit(model, train)
except PatienceError as error:
    result_error = str(error)

result_steps = trainer.global_step
results = trainer.test(model, test)
