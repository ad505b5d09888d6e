"""ViT for image classification from transformers, with a DataModule and test (Niels Rogge's notebooks)."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

pl.seed_everything(23)

id2label = {0: "airplane", 1: "bird", 2: "cat"}


class ViTLightningModule(pl.LightningModule):
    def __init__(self, num_labels=3):
        super().__init__()
        self.vit = ViTForImageClassification(
            ViTConfig(
                image_size=16,
                patch_size=4,
                hidden_size=24,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=48,
                num_labels=num_labels,
                id2label=id2label,
                label2id={v: k for k, v in id2label.items()},
            )
        )

    def forward(self, pixel_values):
        outputs = self.vit(pixel_values=pixel_values)
        return outputs.logits

    def common_step(self, batch, batch_idx):
        pixel_values = batch["pixel_values"]
        labels = batch["labels"]
        logits = self(pixel_values)

        criterion = nn.CrossEntropyLoss()
        loss = criterion(logits, labels)
        predictions = logits.argmax(-1)
        correct = (predictions == labels).sum().item()
        accuracy = correct / pixel_values.shape[0]
        return loss, accuracy

    def training_step(self, batch, batch_idx):
        loss, accuracy = self.common_step(batch, batch_idx)
        # logs metrics for each training_step,
        # and the average across the epoch
        self.log("training_loss", loss)
        self.log("training_accuracy", accuracy)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, accuracy = self.common_step(batch, batch_idx)
        self.log("validation_loss", loss, on_epoch=True)
        self.log("validation_accuracy", accuracy, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        loss, accuracy = self.common_step(batch, batch_idx)
        self.log_dict({"test_loss": loss, "test_accuracy": accuracy})
        return loss

    def configure_optimizers(self):
        # We could make the optimizer more fancy by adding a scheduler and specifying which parameters do
        # not require weight_decay but just using AdamW out-of-the-box works fine
        return torch.optim.AdamW(self.parameters(), lr=5e-4)

    def train_dataloader(self):
        return train_dataloader

    def val_dataloader(self):
        return val_dataloader

    def test_dataloader(self):
        return test_dataloader


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def make_split(n):
    return [{"pixel_values": torch.randn(3, 16, 16), "label": i % 3} for i in range(n)]


train_dataloader = DataLoader(make_split(60), shuffle=True, collate_fn=collate_fn, batch_size=10)
val_dataloader = DataLoader(make_split(20), collate_fn=collate_fn, batch_size=10)
test_dataloader = DataLoader(make_split(20), collate_fn=collate_fn, batch_size=10)

early_stop_callback = EarlyStopping(monitor="validation_loss", patience=3, strict=False, verbose=False, mode="min")
model = ViTLightningModule()
trainer = pl.Trainer(max_epochs=2, callbacks=[early_stop_callback], log_every_n_steps=5)
trainer.fit(model)
results = trainer.test()
