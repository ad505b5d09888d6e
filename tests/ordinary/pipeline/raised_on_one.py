"""One rank alone fails; the script catches what comes, and tries to go on."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class Fails(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 2:
            raise OSError("no space left")


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


L.seed_everything(5)
loader = DataLoader(torch.randn(20, 6), batch_size=5)
module = Regression()
trainer = L.Trainer(max_epochs=1, callbacks=[Fails()], logger=False)


def words(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


results = [
    words(lambda: trainer.fit(module, loader)),
    words(lambda: trainer.test(module, loader)),
    words(lambda: trainer.fit(module, loader)),
    words(lambda: trainer.save_checkpoint("kept.ckpt")),
    words(lambda: L.Trainer(logger=False).test(Regression(), loader)),
]
