"""Names of metrics as users meet them: `val_loss/variant_3`, and `val_loss` for the best of all variants.

Lightning appends `_step`, `_epoch` and the data loader to a name; these belong before the variant.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_NAMED = re.compile(r"(?P<name>.*)/variant_(?P<number>\d+)(?P<rest>.*)")
_MORE_IS_BETTER = frozenset(
    (
        *("acc", "accuracy", "top", "auc", "auroc", "f", "fbeta", "precision", "recall", "sensitivity", "specificity"),
        *("score", "bleu", "rouge", "meteor", "iou", "miou", "jaccard", "dice", "psnr", "ssim", "map", "ap", "mrr"),
        *("ndcg", "r", "kappa", "mcc", "matthews", "corrcoef", "pearson", "spearman", "reward", "return", "likelihood"),
        *("elbo", "explained", "correct", "success", "hit", "hits"),
    )
)
_LESS_IS_BETTER = frozenset(
    (
        *("loss", "error", "err", "nll", "negative", "mse", "mae", "rmse", "mape", "perplexity", "ppl", "wer", "cer"),
        *("ece", "calibration", "brier", "hinge", "hamming", "fid", "divergence", "entropy", "distance", "regret"),
    )
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""`BinaryF1Score` has Binary, F and Score."""
MIN, MAX = "min", "max"


@lru_cache(maxsize=4096)
def divided(name: str) -> tuple[str, int | None]:
    """The metric's name, and the variant's number if it has one."""
    found = _NAMED.fullmatch(name)
    return (name, None) if found is None else (found["name"] + found["rest"], int(found["number"]))


def direction(name: str, modes: Mapping[str, str]) -> str:
    """Whether less or more of a metric is better: as told, or else by its name."""
    if name in modes:
        return modes[name]
    words = {word.lower() for word in _WORDS.findall(name)} | set(re.split(r"[^a-z]+", name.lower()))
    return MIN if _MORE_IS_BETTER.isdisjoint(words) or not _LESS_IS_BETTER.isdisjoint(words) else MAX


def better(value: float, than: float, mode: str) -> bool:
    """Anything is better than what is not a number."""
    if math.isnan(value) or math.isnan(than):
        return math.isnan(than) and not math.isnan(value)
    return value > than if mode == MAX else value < than


def named(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under the names that users know."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        plain, number = divided(name)
        found[name if number is None else f"{plain}/variant_{number}"] = value
    return found


def best_of_all(metrics: Mapping[str, Any], modes: Mapping[str, str]) -> dict[str, Any]:
    """The best variant's value under the plain name, and what is no variant's."""
    found: dict[str, Any] = {}
    best: dict[str, Any] = {}
    for name, value in metrics.items():
        plain, number = divided(name)
        if number is None:
            found[name] = value
        elif plain not in best or better(float(value), float(best[plain]), direction(plain, modes)):
            best[plain] = value
    return {**best, **found}


def mean_loss(losses: list[Any]) -> Tensor | None:
    """One number for the progress of all: the mean of those that are finite."""
    found = [loss.detach().float() for loss in losses if isinstance(loss, Tensor)]
    if not found:
        return None
    if len(found) == 1:
        return found[0]
    values = torch.stack(found)
    finite = torch.isfinite(values)  # without looking at it: a GPU need not be waited for
    return torch.where(finite.any(), torch.where(finite, values, 0.0).sum() / finite.sum(), values.mean())
