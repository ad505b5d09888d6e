"""Siamese network with a triplet loss and a nearest-neighbour check after each epoch (metric-learning repos)."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl.seed_everything(70)


class Triplets(Dataset):
    def __init__(self, n, n_classes=4):
        centres = 2 * torch.randn(n_classes, 10)
        self.labels = torch.arange(n) % n_classes
        self.points = centres[self.labels] + torch.randn(n, 10)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        same = (self.labels == self.labels[i]).nonzero().flatten()
        other = (self.labels != self.labels[i]).nonzero().flatten()
        positive = same[torch.randint(len(same), ())]
        negative = other[torch.randint(len(other), ())]
        return self.points[i], self.points[positive], self.points[negative]


class TripletNet(pl.LightningModule):
    def __init__(self, margin=0.5):
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(10, 32), nn.PReLU(), nn.Linear(32, 32), nn.PReLU(), nn.Linear(32, 8))
        self.loss = nn.TripletMarginLoss(margin=margin)

    def forward(self, x):
        return nn.functional.normalize(self.embedding(x), dim=-1)

    def training_step(self, batch, batch_idx):
        anchor, positive, negative = batch
        loss = self.loss(self(anchor), self(positive), self(negative))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        anchor, positive, negative = (self(x) for x in batch)
        d_pos, d_neg = (anchor - positive).norm(dim=1), (anchor - negative).norm(dim=1)
        self.log("val_loss", self.loss(anchor, positive, negative), prog_bar=True)
        self.log("val_acc", (d_pos < d_neg).float().mean(), prog_bar=True)

    def on_train_epoch_end(self):
        data = self.trainer.train_dataloader.dataset
        with torch.no_grad():
            emb = self(data.points.to(self.device))
        nearest = (torch.cdist(emb, emb) + 10 * torch.eye(len(emb), device=emb.device)).argmin(1).cpu()
        self.log("nn_acc", (data.labels[nearest] == data.labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


model = TripletNet()
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=2, num_sanity_val_steps=0)
trainer.fit(model, DataLoader(Triplets(64), batch_size=8, shuffle=True), DataLoader(Triplets(24), batch_size=8))
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
