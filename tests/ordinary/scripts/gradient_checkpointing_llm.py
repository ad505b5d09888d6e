"""Instruction tuning: a small Qwen2 with gradient checkpointing, built in configure_model, prompts masked by -100."""

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config

L.seed_everything(526)


def make_sample():
    prompt = torch.randint(3, 60, (int(torch.randint(3, 7, ())),))
    answer = torch.cat([prompt.flip(0), torch.tensor([2])])
    return {"prompt": prompt, "answer": answer}


def collate(samples, pad=0):
    longest = max(len(s["prompt"]) + len(s["answer"]) for s in samples)
    input_ids = torch.full((len(samples), longest), pad)
    labels = torch.full((len(samples), longest), -100)
    for row, s in enumerate(samples):
        n, m = len(s["prompt"]), len(s["answer"])
        input_ids[row, : n + m] = torch.cat([s["prompt"], s["answer"]])
        labels[row, n : n + m] = s["answer"]
    return {"input_ids": input_ids, "attention_mask": (input_ids != pad).long(), "labels": labels}


class InstructionTuner(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        config = Qwen2Config(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
            tie_word_embeddings=True,
        )
        self.model = AutoModelForCausalLM.from_config(config)
        self.model.gradient_checkpointing_enable()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        predictions = outputs.logits[:, :-1].argmax(-1)
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        accuracy = (predictions == labels)[counted].float().mean()
        self.log_dict({"val_loss": outputs.loss, "val_token_acc": accuracy}, batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98))


samples = [make_sample() for _ in range(80)]
train = DataLoader(samples[:64], batch_size=8, shuffle=True, collate_fn=collate)
val = DataLoader(samples[64:], batch_size=8, collate_fn=collate)
model = InstructionTuner()
trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=4, gradient_clip_val=1.0, log_every_n_steps=1)
trainer.fit(model, train, val)
trainer.save_checkpoint("tuned.ckpt")
results = trainer.validate(model, val)
