"""Random combinations of what docs/support.md lists: each equals its reference, or is refused at setup.

`PL_PIPE_FUZZ=500 pytest tests/test_pipedream_fuzz.py` draws as many; a failing case is told by its number, which is its
seed: `PL_PIPE_FUZZ_FROM=123 PL_PIPE_FUZZ=1`.
"""

import os
from typing import Any

import pytest
import torch
from fuzz_cases import Case, Resumption, drawn, refusal
from late_rule import Rule, late_run
from lightning_checks import assert_late_script, assert_like, assert_same_script, drained_points
from pipedream_farm import Farm, Job, Order

pytest_plugins = "pipedream_plugin"

COUNT, FIRST = int(os.environ.get("PL_PIPE_FUZZ", "10")), int(os.environ.get("PL_PIPE_FUZZ_FROM", "0"))


def params() -> list[Any]:
    cases = ((seed, drawn(seed)) for seed in range(FIRST, FIRST + COUNT))
    return [pytest.param(case, id=f"{seed}-{case.name}") for seed, case in cases]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", params())
def test_a_random_script_equals_its_reference_or_is_refused(farm: Farm, case: Case) -> None:
    job = farm.start(case.pipeline)
    if is_refused(job, case.pipeline):
        return
    single, ranks = farm.start(case.single).outcome[0], job.outcome
    if case.stop is not None and case.stop[0] == "Slow":
        assert_out_of_time(case, single, ranks)
    elif case.rule.is_late:
        batches = None if case.stop is None else stopped_after(case, single)
        expected = ranks[0] if case.decides and batches is None else single
        assert_late_script(expected, ranks, case.pipeline, exact=True, batches=batches)
    else:
        assert_same_script(single, ranks)
    if case.kept is not None and (case.stop is None or case.stop[0] != "Slow"):
        assert_same_bits(farm.start(case.kept).outcome, ranks)
    if case.resumption is not None:
        assert_continues(farm, case.resumption, job, single)


def is_refused(job: Job, order: Order) -> bool:
    """At setup and on every rank, with a remedy, if and only if it has to be."""
    remedy = refusal(order)
    if remedy is None:
        return False
    for rank, error in enumerate(job.errors):
        assert error.startswith("ConfigError: "), f"rank {rank}: {error}"
        assert remedy in error, f"rank {rank}: {error}"
    assert all("losses" not in result for result in job.results)
    return True


def stopped_after(case: Case, whole: dict[str, Any]) -> int:
    """After how many batches a late pipeline stops: as many later as are in flight, or at a drained point before.

    `whole` is the run that nobody stops.
    """
    assert case.stop is not None
    options = case.stop[1]
    total = len(whole["batches"])
    if options["rank"] == 1:  # rank 0's word counts
        return total
    steps = [step for name, step, _ in whole["hooks"] if name == options["hook"]]
    asked = next((batch + 1 for batch, step in enumerate(steps) if step >= options["step"]), total)
    drained = {total, *epoch_ends(whole), *whole["ends"]}
    return min(asked + case.rule.lag, *(batches for batches in drained if batches >= asked))


def epoch_ends(found: dict[str, Any]) -> list[int]:
    """How many batches had been trained with at the end of each epoch."""
    names = [name for name, *_ in found["hooks"]]
    return [
        names[:index].count("on_train_batch_end") for index, name in enumerate(names) if name == "on_train_epoch_end"
    ]


def assert_out_of_time(case: Case, whole: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """All ranks stop after one and the same batch, whichever it is; until then the run is what it would have been."""
    batches = len(ranks[0]["batches"])
    assert 0 < batches <= len(whole["batches"])
    assert ranks[0]["batches_seen"] == whole["batches_seen"][:batches]
    if case.rule.is_late:
        assert_late_script(whole, ranks, case.pipeline, exact=True, batches=batches)
        return
    assert ranks[0]["losses"] == pytest.approx(whole["losses"][:batches], abs=1e-6, rel=0)
    for found in ranks:
        assert found["steps"] == ranks[0]["steps"]
        assert found["batches_seen"] == ranks[0]["batches_seen"]
        assert_like(found["weights"], ranks[0]["weights"], "weights")


def assert_same_bits(kept: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
    assert kept[0]["losses"] == ranks[0]["losses"]
    for before, found in zip(kept, ranks, strict=True):
        assert all(torch.equal(value, found["weights"][name]) for name, value in before["weights"].items())


def assert_continues(farm: Farm, resumption: Resumption, job: Job, single: dict[str, Any]) -> None:
    """From a checkpoint within an epoch, under another plan: the same loss curve, or the rule's from there on."""
    kept = {torch.load(file, weights_only=True)["global_step"]: file for file in (job.folder / "kept").glob("*.ckpt")}
    steps = [step for step in sorted(kept) if step < single["steps"]]
    if not steps:
        return
    step = steps[resumption.at % len(steps)]
    trained = next(
        index + 1
        for index, found in enumerate(hook for hook in single["hooks"] if hook[0] == "on_train_batch_end")
        if found[1] == step
    )
    order = resumption.order.over(resumption.order.ranks, ckpt_path=str(kept[step]))
    again = farm.start(order)
    rule = Rule.of(order)
    if is_refused(again, order):
        return
    ranks = again.outcome
    if rule.is_late:
        losses, weights = late_run(ranks[0], order, start=torch.load(kept[step], weights_only=True))
    else:
        losses, weights = single["losses"][trained:], single["weights"]
    for found in ranks:
        assert found["batches_seen"] == single["batches_seen"][trained:]
        assert found["steps"] == single["steps"]
        assert not rule.is_late or found["segments"] == drained_points(ranks[0], order)
        assert_like({name: found["weights"][name] for name in weights}, weights, "weights")
    assert ranks[0]["losses"] == pytest.approx(losses, abs=2e-6, rel=0)
