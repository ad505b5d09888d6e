"""What a pipeline's script is compared with: the single run's diary, or the late run of `late_rule`."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from late_rule import Rule, late_run
from pipedream_farm import Order
from torch import Tensor

LOSS, NUMBER = 1e-6, 3e-6
UPDATED = "on_before_optimizer_step"
EVERYWHERE = (
    "hooks",
    "rates",
    "batches_seen",
    "steps",
    "epoch",
    "trained",
    "validated",
    "metrics",
    "logged",
    "weights",
)
"""What is the same on all ranks."""
REPORTED = ("losses", "rows", "module", "answers", "validation_outputs", "summary")
"""What the rank that reports has."""


def assert_like(found: Any, expected: Any, where: str) -> None:
    """The same structure all the way down, and numbers that differ by no more than rounding."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, atol=NUMBER, rtol=1e-5, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_like(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_like(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        both_unknown = math.isnan(found) and math.isnan(expected)
        assert both_unknown or found == pytest.approx(expected, abs=NUMBER, rel=1e-5), where
    else:
        assert found == expected, where


def assert_same_script(single: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """A synchronous pipeline: hooks in their order, logged rows, metrics, checkpoints' facts and weights are equal."""
    assert ranks[0]["losses"] == pytest.approx(single["losses"], abs=LOSS, rel=0)
    for rank, found in enumerate(ranks):
        for name in (*EVERYWHERE, *(REPORTED if rank == 0 else ())):
            assert_like(found.get(name), single.get(name), f"{name} on rank {rank}")
        assert all(found["syncs"]), "metrics add up over ranks again"


def assert_late_script(
    single: dict[str, Any], ranks: list[dict[str, Any]], order: Order, *, exact: bool, batches: int | None = None
) -> None:
    """A pipeline with delay: the same hooks as often, one state on all ranks, and numbers by the published rule.

    `batches` is after how many it has to stop, where a single process does not, or at another one.
    """
    first = ranks[0]
    for rank, found in enumerate(ranks):
        where = f"rank {rank}"
        if batches is None:
            assert found["steps"] == single["steps"], where
            assert _counted(found["hooks"]) == _counted(single["hooks"]), where
            assert found["batches_seen"] == single["batches_seen"], where
            assert (found["epoch"], found["ends"]) == (single["epoch"], single["ends"]), where
            assert found["first_rates"] == pytest.approx(single["first_rates"]), where
        assert len(found["batches_seen"]) == (len(single["batches_seen"]) if batches is None else batches), where
        assert (found["steps"], found["batches_seen"]) == (first["steps"], first["batches_seen"]), where
        assert _without_updates(found["hooks"]) == _without_updates(first["hooks"]), where
        assert_like(found["metrics"], first["metrics"], f"metrics on {where}")
        assert_like(found["weights"], first["weights"], f"weights on {where}")
        assert all(found["syncs"]), where
        assert found["segments"] == drained_points(first, order), f"drained points on {where}"
    if exact:
        for rank, found in enumerate(ranks):
            updates = sum(1 for name, *_ in found["hooks"] if name == UPDATED)
            assert updates == Rule.of(order).updates(found["stage"], found["segments"], len(found["batches"])), rank
        losses, weights = late_run(first, order)
        assert first["losses"] == pytest.approx(losses, abs=2e-6, rel=0)
        assert_like({name: first["weights"][name] for name in weights}, weights, "weights")


def drained_points(found: dict[str, Any], order: Order) -> list[int]:
    """The batches before which all must have been applied: after epochs, validations, checkpoints and short batches."""
    parts = Rule.of(order).microbatches
    points, begun = {0}, 0
    for name, *_ in found["hooks"]:
        if name in ("on_train_epoch_start", "on_validation_end", "on_save_checkpoint"):
            points.add(begun)
        elif name == "on_train_batch_start":
            begun += 1
        elif name == "on_train_batch_end" and _samples(found["batches"][begun - 1]) < parts:
            points.add(begun)
    return sorted(points - {begun})


def _samples(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    return _samples(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def _without_updates(hooks: list[Any]) -> list[Any]:
    """An early stage's updates come later."""
    return [hook for hook in hooks if hook[0] != UPDATED]


def _counted(hooks: list[Any]) -> Counter[str]:
    """A round makes one update of several batches."""
    return Counter(name for name, *_ in _without_updates(hooks))
