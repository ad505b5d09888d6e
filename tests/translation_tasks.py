"""What the ranks of a job do with a translator: train it on number words, and note what came of it."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pipedream_tasks import Rank, Watch, digest, numbers

from pl_pipe.recipes.translation.numbers import numbers_data
from pl_pipe.recipes.translation.translator import Translator

VOCABULARY = 300


def fit(
    me: Rank,
    *,
    strategy: Mapping[str, Any] | str | None = None,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Lists of numbers, 4 sentences a batch and 2 in the last; a network that is as deep as the recipe's and narrow."""
    settings = {"encoder_layers": 3, "decoder_layers": 3, "hidden_size": 8, "dropout": 0.0, "lr": 0.01, **(model or {})}
    torch.manual_seed(seed)
    module = Translator(VOCABULARY, warmup_steps=2, **settings)
    given: dict[str, Any] = {"sentences": 18, "held_out_sentences": 5, "batch_size": 4, "largest": 999, **(data or {})}
    text = numbers_data(vocabulary_size=VOCABULARY, cache=str(me.folder.parent / "text"), **given)
    watch = Watch()
    made = L.Trainer(
        accelerator="cpu",
        devices=me.ranks,
        strategy=me.strategy(strategy),
        callbacks=[watch, ModelCheckpoint(me.folder / "kept", filename="end", save_weights_only=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=me.folder,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, "gradient_clip_val": 5.0, **(trainer or {})},
    )
    made.fit(module, datamodule=text)
    notes = me.notes
    notes.update(
        watch.notes,
        losses=watch.losses,
        rates=watch.rates,
        validated=watch.validated,
        after_fit=numbers(made.callback_metrics),
        batches_seen=[digest(batch) for batch in watch.batches],
        shapes=[tuple(tuple(tensor.shape) for tensor in batch) for batch in watch.batches],
        weights={name: value.clone() for name, value in module.state_dict().items()},
        epoch=made.current_epoch,
        steps=made.global_step,
        trained=[p.requires_grad for p in module.parameters()],
    )
    return notes
