"""LoRA on GPT-2 with peft; only the adapter is in the optimizer and the adapter is saved (peft fine-tuning style)."""

import lightning as L
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

L.seed_everything(17)


class LoraModule(L.LightningModule):
    def __init__(self, base_model, peft_config, lr=1e-2):
        super().__init__()
        self.model = get_peft_model(base_model, peft_config)
        self.lr = lr

    def forward(self, input_ids, attention_mask, labels=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.lr)

    def on_save_checkpoint(self, checkpoint):
        # keep only what LoRA trains
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "lora" in k}


def collate(samples):
    longest = max(len(s) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, s in enumerate(samples):
        ids[i, : len(s)] = s
        mask[i, : len(s)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


texts = [torch.randint(1, 60, (int(n),)) for n in torch.randint(5, 14, (72,))]
train_loader = DataLoader(texts[:56], batch_size=8, shuffle=True, collate_fn=collate)
val_loader = DataLoader(texts[56:], batch_size=8, collate_fn=collate)

base = GPT2LMHeadModel(
    GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
)
peft_config = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
)
model = LoraModule(base, peft_config)
result_trainable, result_total = model.model.get_nb_trainable_parameters()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, train_loader, val_loader)
result_losses = {k: v.item() for k, v in trainer.callback_metrics.items()}
trainer.save_checkpoint("lora.ckpt")
model.model.save_pretrained("adapter")
result_keys = sorted(torch.load("lora.ckpt", weights_only=False)["state_dict"])
