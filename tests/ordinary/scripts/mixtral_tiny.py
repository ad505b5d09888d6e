"""A tiny Mixtral mixture of experts with its router loss (transformers from a config)."""

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

L.seed_everything(1)


class MoELanguageModel(L.LightningModule):
    def __init__(self, **config):
        super().__init__()
        self.save_hyperparameters()
        self.net = MixtralForCausalLM(MixtralConfig(**config))

    def training_step(self, batch, batch_idx):
        out = self.net(input_ids=batch, labels=batch, output_router_logits=True)
        self.log_dict({"loss": out.loss, "aux_loss": out.aux_loss}, prog_bar=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


tokens = torch.randint(0, 48, (72, 12))
model = MoELanguageModel(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=32,
    router_aux_loss_coef=0.02,
)
trainer = L.Trainer(max_epochs=1, gradient_clip_val=0.5, logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(tokens[:56], batch_size=8, shuffle=True), DataLoader(tokens[56:], batch_size=8))
trainer.save_checkpoint("mixtral.ckpt")
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
reloaded = MoELanguageModel.load_from_checkpoint("mixtral.ckpt")
result_same = all(torch.equal(a, b) for a, b in zip(model.parameters(), reloaded.parameters(), strict=True))
