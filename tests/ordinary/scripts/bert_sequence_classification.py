"""BERT for sequence classification with class weights and torchmetrics (blog-post fine-tuning style)."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

pl.seed_everything(12)


class ToxicCommentsDataset(Dataset):
    def __init__(self, size, seq_len=14, n_classes=4):
        self.ids = torch.randint(1, 80, (size, seq_len))
        lengths = torch.randint(4, seq_len + 1, (size, 1))
        self.mask = (torch.arange(seq_len)[None] < lengths).long()
        self.labels = (torch.rand(size, n_classes) > 0.7).float()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


class ToxicCommentTagger(pl.LightningModule):
    def __init__(self, n_classes: int, n_training_steps=None, n_warmup_steps=None):
        super().__init__()
        config = BertConfig(
            vocab_size=80,
            hidden_size=24,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=48,
            max_position_embeddings=20,
        )
        self.bert = BertModel(config)
        self.classifier = nn.Linear(self.bert.config.hidden_size, n_classes)
        self.n_training_steps = n_training_steps
        self.n_warmup_steps = n_warmup_steps
        self.criterion = nn.BCEWithLogitsLoss()
        self.auroc = torchmetrics.AUROC(task="multilabel", num_labels=n_classes)

    def forward(self, input_ids, attention_mask, labels=None):
        output = self.bert(input_ids, attention_mask=attention_mask)
        output = self.classifier(output.pooler_output)
        loss = 0
        if labels is not None:
            loss = self.criterion(output, labels)
        return loss, torch.sigmoid(output)

    def training_step(self, batch, batch_idx):
        loss, outputs = self(batch["input_ids"], batch["attention_mask"], batch["labels"])
        self.log("train_loss", loss, prog_bar=True, logger=True)
        return {"loss": loss, "predictions": outputs, "labels": batch["labels"]}

    def validation_step(self, batch, batch_idx):
        loss, outputs = self(batch["input_ids"], batch["attention_mask"], batch["labels"])
        self.auroc.update(outputs, batch["labels"].int())
        self.log("val_loss", loss, prog_bar=True, logger=True)
        return loss

    def on_validation_epoch_end(self):
        self.log("val_auroc", self.auroc.compute())
        self.auroc.reset()

    def predict_step(self, batch, batch_idx):
        _, outputs = self(batch["input_ids"], batch["attention_mask"])
        return outputs

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / self.n_warmup_steps, max(0.0, (self.n_training_steps - step) / self.n_training_steps)
            ),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


N_EPOCHS, BATCH_SIZE = 2, 8
train_set, val_set = ToxicCommentsDataset(56), ToxicCommentsDataset(24)
total_steps = len(train_set) // BATCH_SIZE * N_EPOCHS
model = ToxicCommentTagger(n_classes=4, n_training_steps=total_steps, n_warmup_steps=total_steps // 5)
checkpoint_callback = pl.callbacks.ModelCheckpoint(
    dirpath="checkpoints", filename="best-checkpoint", save_top_k=1, verbose=True, monitor="val_loss", mode="min"
)
trainer = pl.Trainer(max_epochs=N_EPOCHS, callbacks=[checkpoint_callback], log_every_n_steps=4)
trainer.fit(model, DataLoader(train_set, BATCH_SIZE, shuffle=True), DataLoader(val_set, BATCH_SIZE))

trained_model = ToxicCommentTagger.load_from_checkpoint(checkpoint_callback.best_model_path, n_classes=4)
trained_model.eval()
trained_model.freeze()
item = val_set[0]
_, result_prediction = trained_model(item["input_ids"].unsqueeze(0), item["attention_mask"].unsqueeze(0))
results = trainer.validate(model, DataLoader(val_set, BATCH_SIZE))
