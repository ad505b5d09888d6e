"""GRU forecaster over sliding windows with a scaler in the DataModule, no seed set (time-series notebooks)."""

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TimeseriesDataset(Dataset):
    def __init__(self, x, y, seq_len=1):
        self.x = torch.tensor(x).float()
        self.y = torch.tensor(y).float()
        self.seq_len = seq_len

    def __len__(self):
        return len(self.x) - (self.seq_len - 1)

    def __getitem__(self, index):
        return self.x[index : index + self.seq_len], self.y[index + self.seq_len - 1]


class PowerConsumptionDataModule(L.LightningDataModule):
    def __init__(self, seq_len=10, batch_size=12):
        super().__init__()
        self.seq_len = seq_len
        self.batch_size = batch_size

    def setup(self, stage=None):
        if hasattr(self, "x_train"):
            return
        t = np.arange(160)
        raw = np.stack([np.sin(t / 5), np.cos(t / 9), 0.1 * torch.randn(160).numpy()], axis=1)
        target = np.roll(raw[:, 0], -1)
        scaler = StandardScaler().fit(raw[:110])
        scaled = scaler.transform(raw)
        self.x_train, self.y_train = scaled[:110], target[:110]
        self.x_val, self.y_val = scaled[110:159], target[110:159]

    def train_dataloader(self):
        data = TimeseriesDataset(self.x_train, self.y_train, seq_len=self.seq_len)
        return DataLoader(data, batch_size=self.batch_size, shuffle=False)

    def val_dataloader(self):
        return DataLoader(TimeseriesDataset(self.x_val, self.y_val, seq_len=self.seq_len), batch_size=self.batch_size)


class GRURegressor(L.LightningModule):
    def __init__(self, n_features=3, hidden_size=16, num_layers=2, dropout=0.2, learning_rate=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.gru = nn.GRU(n_features, hidden_size, num_layers, dropout=dropout, batch_first=True)
        self.linear = nn.Linear(hidden_size, 1)
        self.criterion = nn.MSELoss()

    def forward(self, x):
        gru_out, _ = self.gru(x)
        return self.linear(gru_out[:, -1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.criterion(self(x), y), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


dm = PowerConsumptionDataModule()
model = GRURegressor()
trainer = L.Trainer(
    max_epochs=2, callbacks=[EarlyStopping("val_loss", patience=2), RichProgressBar()], log_every_n_steps=3
)
trainer.fit(model, dm)
results = trainer.validate(model, dm)
