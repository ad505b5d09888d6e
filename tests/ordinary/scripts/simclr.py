"""SimCLR with an NT-Xent loss over two views (the UvA deep-learning tutorial's Lightning code)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(42)


class ContrastiveViews(Dataset):
    def __init__(self, n, n_views=2):
        self.images = torch.rand(n, 3, 12, 12)
        self.n_views = n_views

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        views = []
        for _ in range(self.n_views):
            view = self.images[i]
            if torch.rand(()) < 0.5:
                view = view.flip(-1)
            views.append(view + 0.05 * torch.randn_like(view))
        return views, i % 4


class SimCLR(L.LightningModule):
    def __init__(self, hidden_dim, lr, temperature, weight_decay, max_epochs=500):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.temperature > 0.0, "The temperature must be a positive float!"
        # Base model f(.)
        self.convnet = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 4 * hidden_dim),
        )
        # The MLP for g(.) consists of Linear->ReLU->Linear
        self.convnet.append(nn.ReLU(inplace=True))
        self.convnet.append(nn.Linear(4 * hidden_dim, hidden_dim))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.hparams.max_epochs, eta_min=self.hparams.lr / 50
        )
        return [optimizer], [lr_scheduler]

    def info_nce_loss(self, batch, mode="train"):
        imgs, _ = batch
        imgs = torch.cat(imgs, dim=0)

        # Encode all images
        feats = self.convnet(imgs)
        # Calculate cosine similarity
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        # Mask out cosine similarity to itself
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        # Find positive example -> batch_size//2 away from the original example
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        # InfoNCE loss
        cos_sim = cos_sim / self.hparams.temperature
        nll = -cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)
        nll = nll.mean()

        # Logging loss
        self.log(mode + "_loss", nll)
        # Get ranking position of positive example
        comb_sim = torch.cat(
            [cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)],  # First position positive example
            dim=-1,
        )
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        # Logging ranking metrics
        self.log(mode + "_acc_top1", (sim_argsort == 0).float().mean())
        self.log(mode + "_acc_mean_pos", 1 + sim_argsort.float().mean())
        return nll

    def training_step(self, batch, batch_idx):
        return self.info_nce_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self.info_nce_loss(batch, mode="val")


train_loader = DataLoader(ContrastiveViews(64), batch_size=16, shuffle=True, drop_last=True)
val_loader = DataLoader(ContrastiveViews(32), batch_size=16, drop_last=False)
model = SimCLR(hidden_dim=8, lr=5e-3, temperature=0.07, weight_decay=1e-4, max_epochs=2)
trainer = L.Trainer(
    max_epochs=2,
    callbacks=[ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc_top1")],
    log_every_n_steps=2,
)
trainer.fit(model, train_loader, val_loader)
model = SimCLR.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
model.eval()
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
with torch.no_grad():
    result_features = model.convnet(torch.ones(2, 3, 12, 12))
