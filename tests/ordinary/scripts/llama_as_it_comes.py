"""A small Llama as it comes from transformers, use_cache and all (LLM pre-training from scratch style)."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

L.seed_everything(0)


class PackedTokens(Dataset):
    """Blocks of a long stream of tokens."""

    def __init__(self, num_tokens=2048, block_size=16, vocab_size=96):
        stream = torch.randint(0, vocab_size, (num_tokens,))
        self.blocks = stream.view(-1, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return self.blocks[i]


class LitLlama(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        out = self.model(input_ids=batch, labels=batch)
        self.log("train/loss", out.loss, prog_bar=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.model(input_ids=batch, labels=batch)
        self.log("val/loss", out.loss, sync_dist=True)
        return out.loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=3e-3, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


config = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
data = PackedTokens()
train_set, val_set = torch.utils.data.random_split(data, [96, 32])
model = LitLlama(config)
ckpt = ModelCheckpoint(monitor="val/loss", save_top_k=1, save_last=True, filename="llama-{step}")
trainer = L.Trainer(max_epochs=1, callbacks=[ckpt], gradient_clip_val=1.0, val_check_interval=4)
trainer.fit(model, DataLoader(train_set, batch_size=12, shuffle=True), DataLoader(val_set, batch_size=16))
result_loss = trainer.callback_metrics["val/loss"].item()

with torch.no_grad():
    result_tokens = model.model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5, do_sample=False)
