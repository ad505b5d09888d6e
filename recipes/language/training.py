"""How language models are trained: AdamW without decay of biases and norms, a warm-up in steps, then a linear decay."""

import math
from typing import Any

import lightning as L
import torch
from torch import nn

from pl_pipe.errors import ConfigError

DECAYS = ("linear", "constant")


def check_training(*, lr: float, weight_decay: float, warmup_steps: float, lr_decay: str) -> None:
    """Refuses settings that no training can use."""
    if lr <= 0 or weight_decay < 0 or warmup_steps < 0:
        raise ConfigError(
            f"recipe.lr={lr} must be positive, recipe.weight_decay={weight_decay} and "
            f"recipe.warmup_steps={warmup_steps} not negative"
        )
    if lr_decay not in DECAYS:
        raise ConfigError(f"recipe.lr_decay={lr_decay} is unknown; choose one of {', '.join(DECAYS)}")


def lr_factor(step: int, *, warmup_steps: float, total_steps: float, decay: str) -> float:
    """What the base rate is multiplied by at optimizer step `step`: it reaches 1 with the warm-up, and 0 at the end."""
    if step < warmup_steps:
        return min(1.0, (step + 1) / warmup_steps)
    if decay == "constant":
        return 1.0
    return max(0.0, (total_steps - step) / max(1.0, total_steps - warmup_steps))


def make_training(
    module: L.LightningModule, *, lr: float, weight_decay: float, warmup_steps: float, lr_decay: str
) -> dict[str, Any]:
    """What `configure_optimizers` returns; a warm-up below 1 is a share of the whole run."""
    optimizer = torch.optim.AdamW(decay_groups(module, weight_decay), lr=lr)
    total = module.trainer.estimated_stepping_batches
    if math.isinf(total) and (lr_decay != "constant" or 0 < warmup_steps < 1):
        raise ConfigError(
            "the learning rate needs to know how long training lasts; set trainer.max_epochs or trainer.max_steps, "
            "or recipe.lr_decay=constant with a whole number of recipe.warmup_steps"
        )
    warmup = warmup_steps * total if 0 < warmup_steps < 1 else warmup_steps

    def factor(step: int) -> float:
        return lr_factor(step, warmup_steps=warmup, total_steps=total, decay=lr_decay)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms, which are vectors, do not. Tied weights count once."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
