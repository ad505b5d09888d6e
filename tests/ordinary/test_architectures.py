"""Architectures of `transformers` under a pipeline and as fused variants: equal to plain runs, or refused."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where this folder is run alone

from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install -e .[ordinary]"
    ),
]
if importlib.util.find_spec("transformers") is not None:
    from ordinary.architectures import ALL, PARTS, RANKS, away
else:
    ALL, RANKS, PARTS = (), {}, ""

TOLERANCE = dict.fromkeys([("mixtral", PARTS), ("qwen2_moe", PARTS)], 1e-4)
"""Where it is not the usual one: a router's loss is no mean over samples, and has a small weight."""
WARNED = ("clip", PARTS)
"""Each sample is compared with all others of its batch, so that parts of it have other losses."""


def order(name: str, mode: str) -> Order:
    return Order("ordinary.architectures.run", ranks=RANKS.get(mode, 1), name=name, mode=mode)


def cases() -> list[Any]:
    return [
        pytest.param(one.name, mode, order(one.name, "plain"), order(one.name, mode), id=f"{one.name}-{mode}")
        for one in ALL
        for mode in RANKS
    ]


@pytest.mark.parametrize(("name", "mode", "plain", "other"), cases())
def test_an_architecture_trains_as_alone(farm: Farm, name: str, mode: str, plain: Order, other: Order) -> None:
    (expected,) = farm.start(plain).outcome
    job = farm.start(other)
    if (name, mode) == WARNED:
        assert len(job.outcome) == 2
        assert "no mean over samples" in (job.folder / "rank0.log").read_text()
        return
    for rank, found in enumerate(job.outcome):
        assert not away(mode, found, expected, tolerance=TOLERANCE.get((name, mode), 1e-6)), f"rank {rank}"
