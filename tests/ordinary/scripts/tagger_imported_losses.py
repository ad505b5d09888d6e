"""A padded tagger, losses imported by name: class weights in a head, an auxiliary nll_loss, a curriculum by epochs."""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, nll_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

L.seed_everything(77)
PAD, TAGS = 0, 5


class TaggingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, TAGS))

    def forward(self, logits, tags):
        return cross_entropy(logits.flatten(0, 1), tags.flatten(), weight=self.class_weights, ignore_index=PAD)


class Tagger(L.LightningModule):
    def __init__(self, vocabulary=40, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.coarse = nn.Linear(2 * width, 3)
        self.tags = nn.Linear(2 * width, TAGS)
        self.loss = TaggingLoss()

    def forward(self, words):
        hidden, _ = self.rnn(self.embed(words))
        return self.tags(hidden), self.coarse(hidden)

    def training_step(self, batch, batch_idx):
        words, tags = batch
        tags = tags.masked_fill(torch.arange(tags.shape[1]) < self.current_epoch, PAD)  # later words as time goes on
        logits, coarse = self(words)
        auxiliary = nll_loss(log_softmax(coarse, -1).transpose(1, 2), tags.clamp(max=2), ignore_index=PAD)
        loss = self.loss(logits, tags) + 0.3 * auxiliary
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def collate(samples):
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True)


lengths = torch.randint(2, 12, (48,)).tolist()
sentences = [(torch.randint(1, 40, (n,)), torch.randint(1, TAGS, (n,))) for n in lengths]
model = Tagger()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(sentences, batch_size=8, collate_fn=collate))
trainer.save_checkpoint("tagger.ckpt")
