"""What a refused setup leaves behind in its process: nothing that the strategy has opened."""

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pipedream_farm import Farm, Order
from pipedream_tasks import Rank, fit

from pl_pipe.strategies import PipeDreamStrategy

pytest_plugins = "pipedream_plugin"

EPOCH = {"validation": False, "trainer": {"max_epochs": 1}}
REFUSED: dict[str, dict[str, Any]] = {
    "model": {"model": "Manual"},
    "plan": {"strategy": {"split_points": ["layers.7"]}},
    "optimizers": {"model": "TwoOptimizers"},
    "replicas": {"model": "TwoOptimizers", "strategy": {"split_points": [], "replicas": [2]}},
}


def opened() -> Counter[str]:
    """Files, sockets and threads of this process, by what they are."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[str(entry.readlink()).split(":")[0]] += 1
        except FileNotFoundError:  # the one that lists the others
            continue
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    return found


def grown(before: Counter[str]) -> dict[str, int]:
    gc.collect()
    now = opened()
    now.subtract(before)
    return {kind: number for kind, number in now.items() if number > 0}


def refused(me: Rank, *, cases: dict[str, Any]) -> dict[str, Any]:
    """A run that works makes what Lightning and torch keep; then each case is tried twice. The errors are kept, and by
    their tracebacks the trainers, as in a notebook."""
    kept: list[Exception] = []
    fit(Rank(me.rank, me.ranks, me.folder), **EPOCH)
    gc.collect()
    for name, options in cases.items():
        before, tries = opened(), len(kept)
        for _ in range(2):
            try:
                fit(Rank(me.rank, me.ranks, me.folder), **{**EPOCH, **options})
            except Exception as error:
                kept.append(error)
        more, deadline_s = grown(before), time.monotonic() + 10.0
        while more and time.monotonic() < deadline_s:  # threads that end
            time.sleep(0.1)
            more = grown(before)
        me.notes[name] = {"refused": len(kept) - tries, "more": more}
    kept.clear()
    gc.collect()
    me.notes["strategies"] = sum(isinstance(thing, PipeDreamStrategy) for thing in gc.get_objects())
    return me.notes


LEFT = Order("test_pipedream_leftovers.refused", ranks=2, cases=REFUSED)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("order", [pytest.param(LEFT, id="2")])
def test_a_refused_setup_leaves_nothing_open(farm: Farm, order: Order, name: str) -> None:
    for rank, found in enumerate(farm.start(order).outcome):
        assert found[name]["refused"] == 2
        assert not found[name]["more"], f"rank {rank}"


@pytest.mark.parametrize("order", [pytest.param(LEFT, id="2")])
def test_a_failed_runs_strategy_goes_with_its_trainer(farm: Farm, order: Order) -> None:
    """What is done at exit for its children keeps neither it nor the model."""
    assert [found["strategies"] for found in farm.start(order).outcome] == [0, 0]
