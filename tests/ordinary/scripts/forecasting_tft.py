"""A temporal fusion transformer from pytorch_forecasting (its demand-forecasting tutorial, small)."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss

pl.seed_everything(42)

rng = np.random.default_rng(0)
frames = []
for sku in ("a", "b", "c"):
    t = np.arange(40)
    volume = 10 + 3 * np.sin(t / 4) + rng.normal(0, 0.3, 40)
    frames.append(pd.DataFrame({"time_idx": t, "sku": sku, "volume": volume, "price": rng.normal(1, 0.1, 40)}))
data = pd.concat(frames, ignore_index=True).astype({"volume": "float32", "price": "float32"})

max_prediction_length = 4
max_encoder_length = 8
training_cutoff = data["time_idx"].max() - max_prediction_length

training = TimeSeriesDataSet(
    data[lambda x: x.time_idx <= training_cutoff],
    time_idx="time_idx",
    target="volume",
    group_ids=["sku"],
    min_encoder_length=max_encoder_length // 2,
    max_encoder_length=max_encoder_length,
    min_prediction_length=1,
    max_prediction_length=max_prediction_length,
    static_categoricals=["sku"],
    time_varying_known_reals=["time_idx", "price"],
    time_varying_unknown_reals=["volume"],
    target_normalizer=GroupNormalizer(groups=["sku"], transformation="softplus"),
    add_relative_time_idx=True,
    add_target_scales=True,
    add_encoder_length=True,
)
validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
train_dataloader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
val_dataloader = validation.to_dataloader(train=False, batch_size=16, num_workers=0)

trainer = pl.Trainer(
    max_epochs=2,
    enable_model_summary=True,
    gradient_clip_val=0.1,
    limit_train_batches=5,
    callbacks=[EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, mode="min"), LearningRateMonitor()],
    logger=TensorBoardLogger("lightning_logs"),
)
tft = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.03,
    hidden_size=8,
    attention_head_size=2,
    dropout=0.1,
    hidden_continuous_size=8,
    loss=QuantileLoss(),
    log_interval=-1,
    optimizer="adam",
    reduce_on_plateau_patience=4,
)
trainer.fit(tft, train_dataloaders=train_dataloader, val_dataloaders=val_dataloader)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}

tft.eval()
x, _ = next(iter(val_dataloader))
with torch.no_grad():
    result_quantiles = tft(x)["prediction"]
results = trainer.validate(tft, val_dataloader)
