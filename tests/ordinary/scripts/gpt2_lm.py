"""GPT-2 from a config, labels padded by -100 in a collate function (transformers' language-modelling notebooks)."""

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

L.seed_everything(42)

VOCAB_SIZE = 64
PAD_TOKEN_ID = 0


class ToyText(Dataset):
    def __init__(self, n, min_len=6, max_len=20):
        self.samples = [
            torch.randint(1, VOCAB_SIZE, (int(length),)) for length in torch.randint(min_len, max_len + 1, (n,))
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        return self.samples[idx]


def collate_fn(samples):
    input_ids = pad_sequence(samples, batch_first=True, padding_value=PAD_TOKEN_ID)
    attention_mask = pad_sequence([torch.ones_like(s) for s in samples], batch_first=True)
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class GPT2Finetuner(L.LightningModule):
    def __init__(self, lr=5e-4, weight_decay=0.01, warmup_steps=2):
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("val_loss", outputs.loss, prog_bar=True)
        self.log("val_ppl", torch.exp(outputs.loss))

    def configure_optimizers(self):
        no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
        params = [
            {
                "params": [p for n, p in self.model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {
                "params": [p for n, p in self.model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(params, lr=self.hparams.lr)
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


train_loader = DataLoader(ToyText(64), batch_size=8, shuffle=True, collate_fn=collate_fn)
val_loader = DataLoader(ToyText(16), batch_size=8, collate_fn=collate_fn)

model = GPT2Finetuner()
trainer = L.Trainer(max_epochs=2, gradient_clip_val=1.0, accumulate_grad_batches=2, log_every_n_steps=1)
trainer.fit(model, train_loader, val_loader)
results = trainer.validate(model, val_loader)

prompt = torch.tensor([[5, 6, 7]])
model.eval()
result_generated = model.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=PAD_TOKEN_ID)
