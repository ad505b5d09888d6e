"""The module reads self.trainer.datamodule: class names, class weights, an inverse transform (common in repos)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PricesDataModule(L.LightningDataModule):
    def __init__(self, batch_size=10):
        super().__init__()
        self.batch_size = batch_size
        self.feature_names = ["rooms", "area", "age", "distance"]

    def prepare_data(self):
        torch.save({"x": torch.rand(120, 4) * torch.tensor([6.0, 200.0, 80.0, 30.0])}, "prices.pt")

    def setup(self, stage):
        x = torch.load("prices.pt")["x"]
        y = x[:, 0] * 10 + x[:, 1] - 0.3 * x[:, 2] - x[:, 3]
        self.x_mean, self.x_std = x[:80].mean(0), x[:80].std(0)
        self.y_mean, self.y_std = y[:80].mean(), y[:80].std()
        x, y = (x - self.x_mean) / self.x_std, (y - self.y_mean) / self.y_std
        self.train, self.val = TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])

    def inverse_transform(self, y):
        return y * self.y_std.to(y.device) + self.y_mean.to(y.device)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class PriceRegressor(L.LightningModule):
    def __init__(self, width=16, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        # the number of inputs is only known by the data
        if hasattr(self, "net"):
            return
        n = len(self.trainer.datamodule.feature_names)
        w = self.hparams.width
        self.net = nn.Sequential(nn.Linear(n, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        dm = self.trainer.datamodule
        mae = (dm.inverse_transform(self(x)) - dm.inverse_transform(y)).abs().mean()
        self.log("val_mae_euro", mae, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.trainer.datamodule.inverse_transform(self(batch[0]))

    def configure_optimizers(self):
        steps = len(self.trainer.datamodule.train_dataloader()) * self.trainer.max_epochs
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


dm = PricesDataModule()
model = PriceRegressor()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=4)
trainer.fit(model, datamodule=dm)
result_mae = trainer.callback_metrics["val_mae_euro"].item()
result_prices = torch.cat(trainer.predict(model, datamodule=dm))
