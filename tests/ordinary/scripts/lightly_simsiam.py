"""SimSiam from lightly's heads, loss and collapse estimate (lightly's tutorial in Lightning)."""

import lightning.pytorch as pl
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules.heads import SimSiamPredictionHead, SimSiamProjectionHead
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl.seed_everything(20)


class TwoViews(Dataset):
    def __init__(self, n):
        self.images = torch.rand(n, 3, 8, 8)
        self.noise = 0.1 * torch.randn(2, n, 3, 8, 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        views = (self.images[i] + self.noise[0, i], self.images[i].flip(-1) + self.noise[1, i])
        return views, 0, f"image_{i:04d}.png"


class SimSiam(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.projection_head = SimSiamProjectionHead(16, 16, 8)
        self.prediction_head = SimSiamPredictionHead(8, 4, 8)
        self.criterion = NegativeCosineSimilarity()
        self.avg_output_std = 0.0

    def forward(self, x):
        f = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(f)
        p = self.prediction_head(z)
        z = z.detach()
        return z, p

    def training_step(self, batch, batch_idx):
        (x0, x1), _, fnames = batch
        assert all(name.endswith(".png") for name in fnames)
        z0, p0 = self.forward(x0)
        z1, p1 = self.forward(x1)
        loss = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))

        # calculate the per-dimension standard deviation of the outputs
        # we can use this later to check whether the embeddings are collapsing
        output_std = torch.nn.functional.normalize(p0.detach(), dim=1).std(0).mean()
        self.avg_output_std = 0.9 * self.avg_output_std + 0.1 * output_std.item()
        self.log("train_loss_ssl", loss)
        return loss

    def on_train_epoch_end(self):
        self.log("avg_output_std", self.avg_output_std)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)


model = SimSiam()
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(TwoViews(64), batch_size=16, shuffle=True, drop_last=True))
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
