"""Two optimizers, manual optimization with gradient accumulation and schedulers stepped by hand (docs' recipes)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(6)


class TwoOptimizers(L.LightningModule):
    def __init__(self, accumulate=2):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.classifier = nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch, batch_idx):
        opt_cls, opt_dec = self.optimizers()
        sch_cls, sch_dec = self.lr_schedulers()
        x, y = batch

        z = self.encoder(x)
        cls_loss = F.cross_entropy(self.classifier(z), y) / self.accumulate
        self.manual_backward(cls_loss)

        dec_loss = F.mse_loss(self.decoder(self.encoder(x).detach()), x) / self.accumulate
        self.manual_backward(dec_loss)

        # accumulate gradients of N batches
        if (batch_idx + 1) % self.accumulate == 0:
            self.clip_gradients(opt_cls, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt_cls.step()
            opt_cls.zero_grad()
            opt_dec.step()
            opt_dec.zero_grad()
            sch_cls.step()

        # step the second one at the end of the epoch
        if self.trainer.is_last_batch:
            sch_dec.step()

        self.log_dict({"cls_loss": cls_loss, "dec_loss": dec_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        z = self.encoder(x)
        self.log("val_cls", F.cross_entropy(self.classifier(z), y))
        self.log("val_dec", F.mse_loss(self.decoder(z), x))

    def configure_optimizers(self):
        opt_cls = torch.optim.SGD([*self.encoder.parameters(), *self.classifier.parameters()], lr=0.1, momentum=0.9)
        opt_dec = torch.optim.Adam(self.decoder.parameters(), lr=1e-2)
        sch_cls = torch.optim.lr_scheduler.ExponentialLR(opt_cls, 0.9)
        sch_dec = torch.optim.lr_scheduler.StepLR(opt_dec, 1, 0.5)
        return [opt_cls, opt_dec], [sch_cls, sch_dec]


x, y = torch.randn(96, 16), torch.randint(0, 4, (96,))
model = TwoOptimizers()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(
    model,
    DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True),
    DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8),
)
trainer.save_checkpoint("two.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_lrs = [opt.param_groups[0]["lr"] for opt in trainer.optimizers]
