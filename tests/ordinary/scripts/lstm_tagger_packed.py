"""An LSTM tagger with packed sequences and characters (NER tutorials)."""

import lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

L.seed_everything(18)


def make_sentences(n):
    sentences = []
    for length in torch.randint(3, 12, (n,)):
        words = torch.randint(1, 50, (int(length),))
        tags = (words % 3) + (words.roll(1) % 2) * 3
        sentences.append((words, tags))
    return sentences


def collate(batch):
    batch = sorted(batch, key=lambda pair: len(pair[0]), reverse=True)
    words = pad_sequence([w for w, _ in batch], batch_first=True)
    tags = pad_sequence([t for _, t in batch], batch_first=True, padding_value=-1)
    lengths = torch.tensor([len(w) for w, _ in batch])
    return words, tags, lengths


class BiLSTMTagger(L.LightningModule):
    def __init__(self, vocab=50, emb=16, hidden=16, n_tags=6):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb, padding_idx=0)
        self.lstm = nn.LSTM(emb, hidden, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.proj = nn.Sequential(nn.Linear(2 * hidden, 24), nn.ReLU(), nn.Linear(24, n_tags))
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=-1)
        self.acc = MulticlassAccuracy(n_tags, average="micro", ignore_index=-1)

    def forward(self, words, lengths):
        embedded = self.embedding(words)
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True)
        output, _ = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=words.size(1))
        return self.proj(output)

    def training_step(self, batch, batch_idx):
        words, tags, lengths = batch
        logits = self(words, lengths)
        loss = self.loss_fn(logits.view(-1, logits.size(-1)), tags.view(-1))
        self.log("train_loss", loss, batch_size=len(words))
        return loss

    def validation_step(self, batch, batch_idx):
        words, tags, lengths = batch
        logits = self(words, lengths)
        self.acc(logits.view(-1, logits.size(-1)), tags.view(-1))
        loss = self.loss_fn(logits.view(-1, logits.size(-1)), tags.view(-1))
        self.log_dict({"val_loss": loss, "val_acc": self.acc}, batch_size=len(words), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        words, _, lengths = batch
        tags = self(words, lengths).argmax(-1)
        return [t[:n].tolist() for t, n in zip(tags, lengths.tolist(), strict=True)]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


train = DataLoader(make_sentences(80), batch_size=10, shuffle=True, collate_fn=collate)
val = DataLoader(make_sentences(20), batch_size=10, collate_fn=collate)
model = BiLSTMTagger()
trainer = L.Trainer(max_epochs=2, gradient_clip_val=5.0, gradient_clip_algorithm="norm", log_every_n_steps=4)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
result_tags = trainer.predict(model, val)
