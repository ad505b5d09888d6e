"""MoCo: momentum encoder updated inside training_step, a queue of keys in buffers (lightning-bolts' Moco)."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(8)


class MoCo(L.LightningModule):
    def __init__(self, emb_dim=16, num_negatives=64, encoder_momentum=0.95, softmax_temperature=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(emb_dim)
        )
        self.encoder_q(torch.zeros(1, 1, 24))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for param_k in self.encoder_k.parameters():
            param_k.requires_grad = False

        # create the queue
        self.register_buffer("queue", F.normalize(torch.randn(emb_dim, num_negatives), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        em = self.hparams.encoder_momentum
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * em + param_q.data * (1.0 - em)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.hparams.num_negatives % batch_size == 0  # for simplicity
        self.queue[:, ptr : ptr + batch_size] = keys.T
        ptr = (ptr + batch_size) % self.hparams.num_negatives  # move pointer
        self.queue_ptr[0] = ptr

    def forward(self, img_q, img_k, queue):
        q = F.normalize(self.encoder_q(img_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(img_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.hparams.softmax_temperature
        labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        return logits, labels, k

    def training_step(self, batch, batch_idx):
        img_1, img_2 = batch
        self._momentum_update_key_encoder()
        output, target, keys = self(img_1, img_2, self.queue)
        self._dequeue_and_enqueue(keys)
        loss = F.cross_entropy(output, target)
        acc1 = (output.argmax(dim=1) == target).float().mean()
        self.log_dict({"train_loss": loss, "train_acc1": acc1})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)


x = torch.randn(64, 1, 24)
data = TensorDataset(x, x + 0.1 * torch.randn_like(x))
model = MoCo()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
trainer.save_checkpoint("moco.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_pointer = int(model.queue_ptr)
result_queue = model.queue.clone()
