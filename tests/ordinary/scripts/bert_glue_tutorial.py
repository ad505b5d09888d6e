"""BERT on a GLUE-like task, outputs kept in self.outputs and concatenated at epoch end (the GLUE tutorial's style)."""

from collections import defaultdict

import lightning as L
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig, get_linear_schedule_with_warmup

L.seed_everything(42)


class GLUEDataModule(L.LightningDataModule):
    loader_columns = ("input_ids", "token_type_ids", "attention_mask", "labels")

    def __init__(self, max_seq_length=16, train_batch_size=8, eval_batch_size=8):
        super().__init__()
        self.max_seq_length = max_seq_length
        self.train_batch_size = train_batch_size
        self.eval_batch_size = eval_batch_size
        self.num_labels = 2

    def make_features(self, n):
        examples = []
        for _ in range(n):
            length = int(torch.randint(5, self.max_seq_length + 1, (1,)))
            ids = torch.zeros(self.max_seq_length, dtype=torch.long)
            ids[:length] = torch.randint(5, 100, (length,))
            types = torch.zeros_like(ids)
            types[length // 2 : length] = 1
            mask = (torch.arange(self.max_seq_length) < length).long()
            examples.append(
                {
                    "input_ids": ids,
                    "token_type_ids": types,
                    "attention_mask": mask,
                    "labels": (ids.sum() % 2),
                }
            )
        return examples

    def setup(self, stage: str):
        self.dataset = {"train": self.make_features(64), "validation": self.make_features(28)}
        self.eval_splits = [x for x in self.dataset if "validation" in x]

    def train_dataloader(self):
        return DataLoader(self.dataset["train"], batch_size=self.train_batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset["validation"], batch_size=self.eval_batch_size)


class GLUETransformer(L.LightningModule):
    def __init__(
        self,
        num_labels: int,
        eval_splits: list | None = None,
        learning_rate: float = 2e-4,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.config = BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            num_labels=num_labels,
        )
        self.model = AutoModelForSequenceClassification.from_config(self.config)
        self.outputs = defaultdict(list)

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        return outputs[0]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self(**batch)
        val_loss, logits = outputs[:2]

        if self.hparams.num_labels > 1:
            preds = torch.argmax(logits, axis=1)
        elif self.hparams.num_labels == 1:
            preds = logits.squeeze()

        labels = batch["labels"]

        self.outputs[dataloader_idx].append({"loss": val_loss, "preds": preds, "labels": labels})

    def on_validation_epoch_end(self):
        flat_outputs = []
        for lst in self.outputs.values():
            flat_outputs.extend(lst)

        preds = torch.cat([x["preds"] for x in flat_outputs]).detach().cpu().numpy()
        labels = torch.cat([x["labels"] for x in flat_outputs]).detach().cpu().numpy()
        loss = torch.stack([x["loss"] for x in flat_outputs]).mean()
        self.log("val_loss", loss, prog_bar=True)
        self.log_dict(
            {"accuracy": accuracy_score(labels, preds), "f1": f1_score(labels, preds, zero_division=0.0)},
            prog_bar=True,
        )
        self.outputs.clear()

    def configure_optimizers(self):
        """Prepare optimizer and schedule (linear warmup and decay)."""
        model = self.model
        no_decay = ["bias", "LayerNorm.weight"]
        optimizer_grouped_parameters = [
            {
                "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {
                "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(
            optimizer_grouped_parameters, lr=self.hparams.learning_rate, eps=self.hparams.adam_epsilon
        )
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        scheduler = {"scheduler": scheduler, "interval": "step", "frequency": 1}
        return [optimizer], [scheduler]


dm = GLUEDataModule()
dm.setup("fit")
model = GLUETransformer(num_labels=dm.num_labels, eval_splits=dm.eval_splits)
trainer = L.Trainer(max_epochs=1)
trainer.fit(model, datamodule=dm)
results = trainer.validate(model, datamodule=dm)
