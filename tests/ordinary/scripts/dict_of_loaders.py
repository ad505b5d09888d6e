"""A dict of loaders from train_dataloader (min_size), domain adaptation with a gradient reversal layer (DANN)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(518)


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.alpha * grad, None


class DANN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.label_head = nn.Linear(16, 2)
        self.domain_head = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        xs, ys = batch["source"]
        (xt,) = batch["target"]
        p = self.global_step / self.trainer.estimated_stepping_batches
        alpha = 2.0 / (1.0 + torch.exp(torch.tensor(-10.0 * p)).item()) - 1
        features = self.features(torch.cat([xs, xt]))
        label_loss = F.cross_entropy(self.label_head(features[: len(xs)]), ys)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))]).to(self.device)
        domain_logits = self.domain_head(GradientReversal.apply(features, alpha)).squeeze(-1)
        domain_loss = F.binary_cross_entropy_with_logits(domain_logits, domain)
        self.log_dict({"label": label_loss, "domain": domain_loss, "alpha": alpha}, batch_size=len(xs))
        return label_loss + domain_loss

    def train_dataloader(self):
        g = torch.Generator().manual_seed(0)
        xs = torch.randn(64, 10, generator=g)
        loaders = {
            "source": DataLoader(TensorDataset(xs, (xs[:, 0] > 0).long()), batch_size=8, shuffle=True),
            "target": DataLoader(TensorDataset(xs + 0.5), batch_size=10, shuffle=True),
        }
        return CombinedLoader(loaders, mode="min_size")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (1 + 10 * s / 14) ** -0.75)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


model = DANN()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model)
trainer.save_checkpoint("dann.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_steps = trainer.global_step
