"""Scripts as people write them, without a thought of pl-pipe, under its strategies: equal, or refused."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where this folder is run alone

from ordinary.expected import (
    BY_A_CUT,
    BY_PLAN,
    CASES,
    FUSION,
    IN_FLOAT32,
    IN_PARTS,
    LATE,
    NEEDS,
    NOT_CLAIMED,
    PARTS,
    REFUSED,
    ROUNDED,
    RUNS,
    Case,
)
from ordinary.runner import SCRIPTS, differences, reference
from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"
pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
TOLERANCE = {PARTS: 3e-5, FUSION: 1e-5}
"""Sums in another order, which an optimizer like Adam divides by; with whole batches the arithmetic is the same."""


def order(script: str, strategy: str, ranks: int) -> Order:
    arguments = (
        {"precision": "32-true"} if strategy in (FUSION, reference(FUSION, 1)[0]) and script in IN_FLOAT32 else {}
    )
    return Order("ordinary.runner.run", ranks=ranks, script=script, strategy=strategy, arguments=arguments)


def cases() -> list[Any]:
    found = []
    for script in NAMES:
        missing = script in NEEDS and importlib.util.find_spec(NEEDS[script]) is None
        marks = [pytest.mark.skip(reason=f"needs {NEEDS[script]}: pip install -e .[ordinary]")] if missing else []
        for case in CASES:
            if case.strategy in NOT_CLAIMED.get(script, {}) or (case.strategy == PARTS and script not in IN_PARTS):
                continue
            run = case.strategy, case.ranks
            orders = order(script, *reference(*run)), order(script, *run)
            found.append(pytest.param(script, case, *orders, marks=marks, id=f"{script}-{case.strategy}"))
    return found


@pytest.mark.parametrize(("script", "case", "known", "other"), cases())
def test_a_script_does_what_it_does_alone(farm: Farm, script: str, case: Case, known: Order, other: Order) -> None:
    words = REFUSED.get(script, {}).get(case.strategy)
    if words is not None:
        errors = [found.get("error", "it was not refused") for found in farm.start(other).results]
        ran = script in BY_PLAN and case.strategy in LATE and set(errors) == {"it was not refused"}
        assert ran or all(re.search(words, error) for error in errors), errors
        return
    errors = [found.get("error", "") for found in farm.start(other).results]
    if case.strategy in LATE and all(re.search(BY_A_CUT, error, re.DOTALL) for error in errors):
        return
    expected, outcome = farm.start(known).outcome, farm.start(other).outcome
    if case.strategy in LATE or case.strategy in RUNS.get(script, {}):
        assert outcome[0]["weights"].keys() == expected[0]["weights"].keys()
        return
    tolerance = max(TOLERANCE.get(case.strategy, 1e-6), ROUNDED.get(script, 0.0))
    for rank, found in enumerate(outcome):
        alike = expected[rank % len(expected)]
        names = [name for name in ("weights", "results", "trainers", "checkpoints") if rank == 0 or name == "weights"]
        lines = [
            line
            for name in names
            if name in found
            for line in differences(found[name], alike[name], name, tolerance=tolerance)
        ]
        assert not lines, f"rank {rank}: {lines[:5]}"


def test_what_is_expected_is_of_scripts_that_there_are() -> None:
    assert {*RUNS, *REFUSED, *NEEDS, *IN_PARTS, *NOT_CLAIMED, *IN_FLOAT32, *ROUNDED} <= set(NAMES)
