"""BART for summarization, decoder inputs shifted by hand and the loss computed outside the model (blog-post style)."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BartConfig, BartForConditionalGeneration

pl.seed_everything(8)

PAD, BOS, EOS = 1, 0, 2


def shift_tokens_right(input_ids, pad_token_id):
    """Shift input ids one token to the right, and wrap the last non pad token."""
    prev_output_tokens = input_ids.clone()
    index_of_eos = (input_ids.ne(pad_token_id).sum(dim=1) - 1).unsqueeze(-1)
    prev_output_tokens[:, 0] = input_ids.gather(1, index_of_eos).squeeze()
    prev_output_tokens[:, 1:] = input_ids[:, :-1]
    return prev_output_tokens


def freeze_params(model):
    for layer in model.parameters():
        layer.requires_grad = False


class LitBart(pl.LightningModule):
    def __init__(self, learning_rate, model, freeze_embeds=True):
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        if freeze_embeds:
            freeze_params(self.model.model.shared)
            for d in [self.model.model.encoder, self.model.model.decoder]:
                freeze_params(d.embed_positions)

    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)

    def step(self, batch):
        src_ids, src_mask, tgt_ids = batch
        decoder_input_ids = shift_tokens_right(tgt_ids, PAD)
        outputs = self(src_ids, attention_mask=src_mask, decoder_input_ids=decoder_input_ids, use_cache=False)
        lm_logits = outputs[0]
        ce_loss_fct = nn.CrossEntropyLoss(ignore_index=PAD)
        return ce_loss_fct(lm_logits.view(-1, lm_logits.shape[-1]), tgt_ids.view(-1))

    def training_step(self, batch, batch_idx):
        return {"loss": self.step(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def generate_text(self, ids, mask, max_len=8):
        return self.model.generate(
            ids, attention_mask=mask, use_cache=True, max_length=max_len, num_beams=2, early_stopping=True
        )

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


def make_data(n):
    src = torch.randint(3, 50, (n, 14))
    mask = (torch.arange(14)[None] < torch.randint(6, 15, (n, 1))).long()
    src[mask == 0] = PAD
    tgt = torch.full((n, 8), PAD)
    tgt[:, 0] = BOS
    tgt[:, 1:5] = src[:, :4]
    tgt[:, 5] = EOS
    return TensorDataset(src, mask, tgt)


config = BartConfig(
    vocab_size=50,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
)
model = LitBart(learning_rate=2e-3, model=BartForConditionalGeneration(config))
train, val = make_data(48), make_data(16)
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8))
results = trainer.validate(model, DataLoader(val, batch_size=8))
model.eval()
result_summary = model.generate_text(val[0][0][None], val[0][1][None])
