"""GRU encoder-decoder with attention and teacher forcing (bentrevett's pytorch-seq2seq, in Lightning)."""

import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(1234)

SRC_PAD_IDX = TRG_PAD_IDX = 0
SOS = 1


class Encoder(nn.Module):
    def __init__(self, input_dim, emb_dim, hid_dim, dropout):
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.GRU(emb_dim, hid_dim, bidirectional=True)
        self.fc = nn.Linear(hid_dim * 2, hid_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src):
        embedded = self.dropout(self.embedding(src))
        outputs, hidden = self.rnn(embedded)
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))
        return outputs, hidden


class Attention(nn.Module):
    def __init__(self, hid_dim):
        super().__init__()
        self.attn = nn.Linear(hid_dim * 3, hid_dim)
        self.v = nn.Linear(hid_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs, mask):
        src_len = encoder_outputs.shape[0]
        hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
        encoder_outputs = encoder_outputs.permute(1, 0, 2)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        attention = self.v(energy).squeeze(2)
        attention = attention.masked_fill(mask == 0, -1e10)
        return F.softmax(attention, dim=1)


class Decoder(nn.Module):
    def __init__(self, output_dim, emb_dim, hid_dim, dropout):
        super().__init__()
        self.output_dim = output_dim
        self.attention = Attention(hid_dim)
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.GRU(hid_dim * 2 + emb_dim, hid_dim)
        self.fc_out = nn.Linear(hid_dim * 3 + emb_dim, output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token, hidden, encoder_outputs, mask):
        embedded = self.dropout(self.embedding(token.unsqueeze(0)))
        a = self.attention(hidden, encoder_outputs, mask).unsqueeze(1)
        weighted = torch.bmm(a, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
        prediction = self.fc_out(torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), dim=1))
        return prediction, hidden.squeeze(0), a.squeeze(1)


class Seq2Seq(L.LightningModule):
    def __init__(self, vocab=24, emb_dim=12, hid_dim=16, dropout=0.1, teacher_forcing_ratio=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(vocab, emb_dim, hid_dim, dropout)
        self.decoder = Decoder(vocab, emb_dim, hid_dim, dropout)
        self.criterion = nn.CrossEntropyLoss(ignore_index=TRG_PAD_IDX)

    def create_mask(self, src):
        return (src != SRC_PAD_IDX).permute(1, 0)

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        batch_size, trg_len = src.shape[1], trg.shape[0]
        outputs = torch.zeros(trg_len, batch_size, self.decoder.output_dim, device=self.device)
        encoder_outputs, hidden = self.encoder(src)
        token = trg[0, :]
        mask = self.create_mask(src)
        for t in range(1, trg_len):
            output, hidden, _ = self.decoder(token, hidden, encoder_outputs, mask)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            token = trg[t] if teacher_force else output.argmax(1)
        return outputs

    def step(self, batch, ratio):
        src, trg = (t.transpose(0, 1) for t in batch)
        output = self(src, trg, ratio)
        return self.criterion(output[1:].reshape(-1, output.shape[-1]), trg[1:].reshape(-1))

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, self.hparams.teacher_forcing_ratio)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch, 0.0), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


src = torch.randint(2, 24, (80, 8))
src[:40, 6:] = SRC_PAD_IDX
trg = torch.cat([torch.full((80, 1), SOS), src.flip(1)[:, 2:]], dim=1)
model = Seq2Seq()
trainer = L.Trainer(max_epochs=2, gradient_clip_val=1, log_every_n_steps=2)
trainer.fit(
    model,
    DataLoader(TensorDataset(src[:64], trg[:64]), batch_size=8, shuffle=True),
    DataLoader(TensorDataset(src[64:], trg[64:]), batch_size=8),
)
trainer.save_checkpoint("seq2seq.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
