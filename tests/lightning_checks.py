"""What a pipeline's script is compared with: the single run's diary, or a late run written out in one process.

             drained        drained             in a segment, batch n computes on stage s of S with the weights
batches  0 1 2 3 │ 4 5 6 7 8 │ …                  pipedream       after n-(S-1-s) updates
         └segment┘ └ segment ┘                    vertical sync   after n-(S-1) updates
                                                  pipedream_2bw   after n-1 updates
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from pipedream_farm import Order
from pipedream_models import OPTIMIZERS, make
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

STAGE_OF_LAYER = {2: (0, 0, 1, 1), 3: (0, 1, 1, 2), 4: (0, 1, 2, 3)}
"""As pipedream_tasks.SPLITS cuts an Mlp's layers."""
LOSS, NUMBER = 1e-6, 3e-6
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
    single: dict[str, Any], ranks: list[dict[str, Any]], order: Order, *, exact: bool, extra: int = 0
) -> None:
    """A pipeline with delay: the same hooks as often, one state on all ranks, and numbers by the published rule.

    `extra` is how many batches more than a single process it trains with when it is told to stop.
    """
    first = ranks[0]
    for rank, found in enumerate(ranks):
        where = f"rank {rank}"
        assert found["steps"] == single["steps"] + extra, where
        if not extra:
            assert Counter(name for name, *_ in found["hooks"]) == Counter(name for name, *_ in single["hooks"]), where
            assert found["batches_seen"] == single["batches_seen"], where
            assert (found["epoch"], found["ends"]) == (single["epoch"], single["ends"]), where
        assert _without_updates(found["hooks"]) == _without_updates(first["hooks"]), where
        assert_like(found["metrics"], first["metrics"], f"metrics on {where}")
        assert_like(found["weights"], first["weights"], f"weights on {where}")
        assert all(found["syncs"]), where
    if exact:
        losses, weights = late_run(ranks, order)
        assert first["losses"] == pytest.approx(losses, abs=2e-6, rel=0)
        assert_like({name: first["weights"][name] for name in weights}, weights, "weights")


def _without_updates(hooks: list[Any]) -> list[Any]:
    """An early stage's updates come later."""
    return [hook for hook in hooks if hook[0] != "on_before_optimizer_step"]


def late_run(
    ranks: list[dict[str, Any]], order: Order, start: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of an Mlp by the rule of the order's schedule; `start` is a checkpoint's content."""
    options, stages = order.options, STAGE_OF_LAYER[order.ranks]
    model = make("Mlp", seed=options.get("seed", 0))
    optimizer = OPTIMIZERS[options.get("optimizer", "momentum")](model.parameters())
    if start is not None:
        model.load_state_dict(start["state_dict"], strict=False)
        optimizer.load_state_dict(start["optimizer_states"][0])
    lags = [_lag(options["strategy"], order.ranks, stage) for stage in stages]
    segments = set(ranks[-1]["segments"])  # the first stage's: it is the last to be drained
    losses, begin = [], 0
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for number, (x, y) in enumerate(ranks[0]["batches"]):
        begin = number if number in segments else begin
        versions = {name: history[max(begin, number - lags[_layer(name)])][name] for name in history[0]}
        used = {name: value.clone().requires_grad_() for name, value in versions.items()}
        loss = F.cross_entropy(functional_call(model, used, (x,)), y)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            parameter.grad = used[name].grad
        _clip(model, stages, options.get("trainer", {}))
        optimizer.param_groups[0]["lr"] = ranks[0]["first_rates"][number]
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return losses, history[-1]


def _lag(strategy: dict[str, Any], ranks: int, stage: int) -> int:
    if strategy["schedule"] == "pipedream_2bw":
        return 1
    return ranks - 1 if strategy.get("vertical_sync") else ranks - 1 - stage


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _clip(model: torch.nn.Module, stages: tuple[int, ...], trainer: dict[str, Any]) -> None:
    """Each stage on its own."""
    limit = trainer.get("gradient_clip_val")
    if limit is None:
        return
    for stage in set(stages):
        own = [p for name, p in model.named_parameters() if stages[_layer(name)] == stage]
        if trainer.get("gradient_clip_algorithm") == "value":
            torch.nn.utils.clip_grad_value_(own, limit)
        else:
            torch.nn.utils.clip_grad_norm_(own, limit)
