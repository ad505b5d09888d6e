"""A word-level LSTM language model with F.cross_entropy(ignore_index=pad) (the PyTorch word_language_model example)."""

import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

pl.seed_everything(1111)

PAD = 0


class RNNModel(pl.LightningModule):
    def __init__(self, ntoken=40, ninp=24, nhid=24, nlayers=2, dropout=0.2, tie_weights=True):
        super().__init__()
        self.save_hyperparameters()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp, padding_idx=PAD)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.init_weights()

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens):
        emb = self.drop(self.encoder(tokens))
        output, _ = self.rnn(emb)
        return self.decoder(self.drop(output))

    def loss(self, tokens):
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("train_ppl", math.exp(loss.item()), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=batch.size(0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)


def sentences(n):
    lengths = torch.randint(4, 15, (n,))
    return [torch.randint(1, 40, (int(k),)) for k in lengths]


def collate(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)


train = DataLoader(sentences(80), batch_size=10, shuffle=True, collate_fn=collate)
val = DataLoader(sentences(30), batch_size=10, collate_fn=collate)
model = RNNModel()
trainer = pl.Trainer(
    max_epochs=2, gradient_clip_val=0.25, callbacks=[ModelCheckpoint(monitor="val_loss")], log_every_n_steps=2
)
trainer.fit(model, train, val)
results = trainer.validate(ckpt_path="best", dataloaders=val)
