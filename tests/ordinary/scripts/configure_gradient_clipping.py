"""configure_gradient_clipping overridden: clip the recurrent part only, from the third step on (docs' recipe)."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(502)


class ClippedRNN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.rnn = nn.RNN(16, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        h, _ = self.rnn(torch.tanh(self.inp(x)))
        return self.out(h[:, -1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        # If using mixed precision, the gradients are already unscaled here
        norms = grad_norm(self.rnn, norm_type=2)
        self.log_dict(norms)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if self.global_step >= 2:
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )
        else:
            nn.utils.clip_grad_value_(self.rnn.parameters(), 0.01)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


x = torch.randn(64, 9, 4)
data = TensorDataset(x, x.sum((1, 2)))
model = ClippedRNN()
trainer = pl.Trainer(
    max_epochs=2, gradient_clip_val=0.05, gradient_clip_algorithm="norm", accumulate_grad_batches=2, log_every_n_steps=1
)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
