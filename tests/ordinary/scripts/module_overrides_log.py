"""A base model that overrides log(self, *args, **kwargs) and log_dict (pytorch_forecasting's BaseModel style)."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(3)


class BaseModel(pl.LightningModule):
    def __init__(self, log_interval=10, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()

    @property
    def current_stage(self):
        stages = {"train": "train", "validate": "val", "test": "test", "sanity_check": "sanity"}
        return stages.get(self.trainer.state.stage.value, "predict")

    def log(self, *args, **kwargs):
        """See :meth:`~lightning.pytorch.core.LightningModule.log`."""
        # never log for prediction
        if not (self.trainer.predicting or self.trainer.sanity_checking):
            super().log(*args, **kwargs)

    def step(self, x, y, batch_idx, **kwargs):
        out = self(x, **kwargs)
        prediction = out["prediction"]
        loss = self.loss(prediction, y)
        self.log(
            f"{self.current_stage}_loss",
            loss,
            on_step=self.training,
            on_epoch=True,
            prog_bar=True,
            batch_size=len(y),
        )
        return {"loss": loss, "n_samples": len(y)}, out

    def training_step(self, batch, batch_idx):
        x, y = batch
        log, _ = self.step(x, y, batch_idx)
        return log

    def validation_step(self, batch, batch_idx):
        x, y = batch
        log, _ = self.step(x, y, batch_idx)
        return log

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])["prediction"]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
                "monitor": "val_loss",
                "interval": "epoch",
                "frequency": 1,
                "strict": False,
            },
        }


class QuantileLoss(nn.Module):
    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.quantiles = quantiles

    def forward(self, y_pred, target):
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = target - y_pred[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
        return 2 * torch.cat(losses, dim=2).mean()


class FullyConnected(BaseModel):
    def __init__(self, encoder_length=12, prediction_length=4, hidden=24, n_hidden_layers=3, **kwargs):
        self.save_hyperparameters()
        super().__init__(**kwargs)
        self.loss = QuantileLoss()
        layers = [nn.Linear(encoder_length, hidden), nn.ReLU()]
        for _ in range(n_hidden_layers):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        layers += [nn.Linear(hidden, prediction_length * 3)]
        self.network = nn.Sequential(*layers)

    def forward(self, x):
        network_input = x["encoder_cont"].squeeze(-1)
        prediction = self.network(network_input).unflatten(-1, (self.hparams.prediction_length, 3))
        return {"prediction": prediction}


def collate(samples):
    series = torch.stack([s[0] for s in samples])
    return {"encoder_cont": series[:, :12, None], "decoder_time_idx": torch.arange(4)}, series[:, 12:]


t = torch.arange(16).float()
series = torch.sin(t * (0.2 + torch.rand(96, 1)) + 6 * torch.rand(96, 1)) + 0.1 * torch.randn(96, 16)
train = DataLoader(TensorDataset(series[:64]), batch_size=8, shuffle=True, collate_fn=collate)
val = DataLoader(TensorDataset(series[64:]), batch_size=16, collate_fn=collate)

model = FullyConnected(learning_rate=5e-3)
trainer = pl.Trainer(
    max_epochs=2,
    gradient_clip_val=0.1,
    callbacks=[EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=3, mode="min")],
)
trainer.fit(model, train_dataloaders=train, val_dataloaders=val)
result_test = trainer.test(model, dataloaders=val)
result_quantiles = torch.cat(trainer.predict(model, val))
