"""T5 seq2seq with generate() in validation_step (the T5 fine-tuning notebooks)."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.aggregation import MeanMetric
from transformers import T5Config, T5ForConditionalGeneration

pl.seed_everything(42)

EOS, PAD = 1, 0


class ReverseDataset(Dataset):
    """Say it backwards."""

    def __init__(self, n):
        self.items = [torch.randint(2, 30, (int(k),)) for k in torch.randint(4, 9, (n,))]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        words = self.items[index]
        source = torch.full((10,), PAD)
        target = torch.full((10,), PAD)
        source[: len(words)] = words
        source[len(words)] = EOS
        target[: len(words)] = words.flip(0)
        target[len(words)] = EOS
        return {
            "source_ids": source,
            "source_mask": (source != PAD).long(),
            "target_ids": target,
            "target_mask": (target != PAD).long(),
        }


class T5FineTuner(pl.LightningModule):
    def __init__(self, learning_rate=3e-3):
        super().__init__()
        self.save_hyperparameters()
        config = T5Config(
            vocab_size=32,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
        self.model = T5ForConditionalGeneration(config)
        self.exact = MeanMetric()

    def forward(self, input_ids, attention_mask=None, decoder_attention_mask=None, labels=None):
        return self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
            labels=labels,
        )

    def _step(self, batch):
        labels = batch["target_ids"].clone()
        labels[labels[:, :] == PAD] = -100
        outputs = self(
            input_ids=batch["source_ids"],
            attention_mask=batch["source_mask"],
            labels=labels,
            decoder_attention_mask=batch["target_mask"],
        )
        return outputs[0]

    def training_step(self, batch, batch_idx):
        loss = self._step(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        loss = self._step(batch)
        generated = self.model.generate(
            batch["source_ids"], attention_mask=batch["source_mask"], max_new_tokens=8, num_beams=1, do_sample=False
        )
        width = min(generated.shape[1] - 1, batch["target_ids"].shape[1])
        hits = (generated[:, 1 : width + 1] == batch["target_ids"][:, :width]).float().mean(dim=1)
        self.exact.update(hits)
        self.log("val_loss", loss)
        self.log("val_overlap", self.exact, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, eps=1e-8)


model = T5FineTuner()
trainer = pl.Trainer(max_epochs=2, gradient_clip_val=1.0, num_sanity_val_steps=1, enable_checkpointing=False)
trainer.fit(
    model, DataLoader(ReverseDataset(64), batch_size=8, shuffle=True), DataLoader(ReverseDataset(16), batch_size=8)
)
result_loss = trainer.callback_metrics["val_loss"].item()
result_overlap = trainer.callback_metrics["val_overlap"].item()
