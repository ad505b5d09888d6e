"""nn.TransformerEncoder with positional encoding and a causal mask (PyTorch's transformer tutorial in Lightning)."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(42)


class WikiText(Dataset):
    def __init__(self, n=80, block_size=16, vocab_size=33):
        data = torch.randint(0, vocab_size, (n * 4 + block_size + 1,))
        data[1::2] = (data[::2][: len(data[1::2])] * 3 + 1) % vocab_size
        self.data, self.n, self.block_size, self.vocab_size = data, n, block_size, vocab_size

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        start = index * 4
        inputs = self.data[start : start + self.block_size]
        target = self.data[(start + 1) : (start + self.block_size + 1)]
        return inputs, target


class PositionalEncoding(nn.Module):
    def __init__(self, dim, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe = torch.zeros(1, max_len, dim)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size, ninp=32, nhead=4, nhid=64, nlayers=3, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.ninp = ninp
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        layer = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.decoder = nn.Linear(ninp, vocab_size)

    def forward(self, inputs):
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), device=inputs.device)
        x = self.pos_encoder(self.embedding(inputs) * math.sqrt(self.ninp))
        x = self.encoder(x, mask=mask, is_causal=True)
        return F.log_softmax(self.decoder(x), dim=-1)

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        output = self(inputs)
        loss = F.nll_loss(output.view(-1, output.size(-1)), target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        output = self(inputs)
        loss = F.nll_loss(output.view(-1, output.size(-1)), target.view(-1))
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        inputs, target = batch
        output = self(inputs)
        loss = F.nll_loss(output.view(-1, output.size(-1)), target.view(-1))
        self.log("test_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


dataset = WikiText()
n = len(dataset)
train_dataset, val_dataset, test_dataset = torch.utils.data.random_split(dataset, [n - 32, 16, 16])
train_dataloader = DataLoader(train_dataset, batch_size=8, shuffle=True)
val_dataloader = DataLoader(val_dataset, batch_size=8, shuffle=False)
test_dataloader = DataLoader(test_dataset, batch_size=8, shuffle=False)

model = LanguageModel(vocab_size=dataset.vocab_size)
trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=2, log_every_n_steps=1)
trainer.fit(model, train_dataloader, val_dataloader)
results = trainer.test(model, test_dataloader)
