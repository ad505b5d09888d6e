"""Keyword spotting on raw waveforms with a wav2vec-like convolutional encoder (torchaudio tutorial style)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

L.seed_everything(99)


class SpeechCommands(Dataset):
    def __init__(self, n, rate=800):
        t = torch.arange(rate) / rate
        self.labels = torch.randint(0, 4, (n,))
        freq = 20.0 * (self.labels + 1)
        self.waves = torch.sin(2 * torch.pi * freq[:, None] * t) + 0.3 * torch.randn(n, rate)
        self.lengths = torch.randint(rate // 2, rate, (n,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.waves[i, : self.lengths[i]], self.labels[i]


def pad_sequence(batch):
    waves, labels = zip(*batch, strict=True)
    waves = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True, padding_value=0.0)
    return waves.unsqueeze(1), torch.stack(labels)


class ConvBlock(nn.Module):
    def __init__(self, c_in, c_out, kernel, stride):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, stride, bias=False)
        self.norm = nn.GroupNorm(1, c_out)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class KeywordSpotter(L.LightningModule):
    def __init__(self, dim=16, num_classes=4):
        super().__init__()
        self.feature_extractor = nn.Sequential(
            ConvBlock(1, dim, 10, 5), ConvBlock(dim, dim, 8, 4), ConvBlock(dim, dim, 4, 2)
        )
        self.pos_conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(dim, dim, 5, padding=2, groups=4))
        self.encoder = nn.GRU(dim, dim, num_layers=1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * dim, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes)

    def forward(self, wave):
        x = self.feature_extractor(wave)
        x = x + F.gelu(self.pos_conv(x))
        x, _ = self.encoder(x.transpose(1, 2))
        return self.head(x.mean(dim=1))

    def training_step(self, batch, batch_idx):
        wave, label = batch
        loss = F.cross_entropy(self(wave), label, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        wave, label = batch
        self.accuracy(self(wave), label)
        self.log("val_acc", self.accuracy, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.005, weight_decay=0.0001)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.1)]


train_loader = DataLoader(SpeechCommands(64), batch_size=8, shuffle=True, collate_fn=pad_sequence)
test_loader = DataLoader(SpeechCommands(24), batch_size=8, collate_fn=pad_sequence)
model = KeywordSpotter()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, train_loader, test_loader)
results = trainer.test(model, test_loader)
