"""torchgeo's ClassificationTask on made-up multispectral images (torchgeo's trainers tutorial)."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import ClassificationTask

pl.seed_everything(0)


class MiniEuroSAT(Dataset):
    classes = ("forest", "river", "highway")

    def __init__(self, n):
        self.images = torch.rand(n, 4, 32, 32)
        self.labels = torch.randint(0, 3, (n,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"image": self.images[i], "label": self.labels[i]}


class MiniEuroSATDataModule(pl.LightningDataModule):
    def setup(self, stage):
        self.train, self.val, self.test = MiniEuroSAT(32), MiniEuroSAT(16), MiniEuroSAT(16)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=8)


task = ClassificationTask(
    model="mobilenetv3_small_050", in_channels=4, num_classes=3, loss="ce", weights=None, lr=1e-3, patience=5
)
callbacks = [
    ModelCheckpoint(monitor="val_loss", dirpath="checkpoints", save_top_k=1, save_last=True),
    EarlyStopping(monitor="val_loss", min_delta=0.00, patience=10),
]
trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, log_every_n_steps=1, min_epochs=1, logger=False)
datamodule = MiniEuroSATDataModule()
trainer.fit(model=task, datamodule=datamodule)
results = trainer.test(model=task, datamodule=datamodule)
result_best = callbacks[0].best_model_score.item()
