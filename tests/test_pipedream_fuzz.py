"""Random combinations of what docs/support.md lists: each equals its reference, or is refused at setup.

`PL_PIPE_FUZZ=500 pytest tests/test_pipedream_fuzz.py` draws as many; a failing case is told by its number, which is its
seed: `PL_PIPE_FUZZ_FROM=123 PL_PIPE_FUZZ=1`.
"""

import os
import random
from typing import Any, NamedTuple

import pytest
import torch
from lightning_checks import assert_late_script, assert_like, assert_same_script, late_run
from pipedream_farm import Farm, Job, Order
from test_pipedream_lightning import script

pytest_plugins = "pipedream_plugin"

COUNT, FIRST = int(os.environ.get("PL_PIPE_FUZZ", "8")), int(os.environ.get("PL_PIPE_FUZZ_FROM", "0"))
SYNCHRONOUS = ("1f1b", "gpipe")
REFUSABLE = ("accumulate_grad_batches", "num_microbatches")
"""Settings that not every schedule bears."""


class Case(NamedTuple):
    single: Order
    pipeline: Order
    resumed_at: int | None
    """The step from whose checkpoint another plan goes on."""
    resumed: Order

    @property
    def is_late(self) -> bool:
        return self.pipeline.options["strategy"]["schedule"] not in SYNCHRONOUS


def drawn(seed: int) -> Case:
    chance = random.Random(seed)
    schedule = chance.choice(("pipedream", "pipedream_2bw", "1f1b", "gpipe"))
    late = schedule not in SYNCHRONOUS
    resumes = chance.random() < 0.35
    samples, batch_size = chance.randint(11, 18), chance.randint(3, 5)
    trainer: dict[str, Any] = {"max_epochs": chance.randint(1, 3)}
    batches = -(-samples // batch_size)
    if not resumes and chance.random() < 0.3:
        batches = trainer["limit_train_batches"] = chance.randint(2, batches)
    validates = not resumes and chance.random() < 0.7
    if validates:
        trainer["num_sanity_val_steps"] = chance.choice((0, 2))
        trainer["val_check_interval"] = chance.choice((1.0, 0.5, chance.randint(1, batches)))
        trainer["limit_val_batches"] = chance.choice((1.0, 1))
    if chance.random() < 0.3:
        trainer["max_steps"] = chance.randint(2, batches * trainer["max_epochs"])
    if chance.random() < 0.4:
        algorithm, limit = chance.choice((("norm", 0.3), ("value", 0.05)))
        trainer |= {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    if chance.random() < 0.25:
        trainer["accumulate_grad_batches"] = chance.randint(2, 3)
    if not late and chance.random() < 0.15:
        trainer["precision"] = "64-true"
    options: dict[str, Any] = {
        "seed": seed,
        "data": "resumable" if resumes else "loader",
        "optimizer": chance.choice(("momentum", "adamw")),
        "scheduler": chance.choice((None, "step", "epoch", *(("plateau",) if validates else ()))),
        "data_options": {"samples": samples, "batch_size": batch_size},
        "shuffle": not resumes and chance.random() < 0.5,
        "validation": "loader" if validates else None,
        "trainer": trainer,
        "model": "Mlp" if late or resumes else chance.choice(("Mlp", "Logs", "Keeps", "Groups", "Frozen", "MadeLate")),
    }
    if resumes or chance.random() < 0.3:
        every = chance.randint(1, 4)
        options["callbacks"] = [["ModelCheckpoint", {"every_n_train_steps": every, "save_top_k": -1}]]
    single = script(**options)
    over = {"split": options["model"] != "MadeLate"}
    other = chance.choice(SYNCHRONOUS if not late else ("pipedream", "pipedream_2bw"))
    strategies = [{"schedule": name, **_parts(chance, name)} for name in (schedule, other)]
    pipeline = single.over(chance.randint(2, 4), strategy=strategies[0], **over)
    resumed = single.over(chance.randint(2, 4), strategy=strategies[1], **over)
    return Case(single, pipeline, chance.randint(1, 6) if resumes else None, resumed)


def _parts(chance: random.Random, schedule: str) -> dict[str, Any]:
    if schedule == "pipedream":
        return {"vertical_sync": True} if chance.random() < 0.3 else {}
    return {"num_microbatches": chance.randint(1, 5)} if chance.random() < 0.6 else {}


def is_refused(job: Job, order: Order) -> bool:
    """At setup and on every rank, with a remedy, and for a setting that may be refused."""
    errors = [result.get("error") for result in job.results]
    if not any(errors):
        return False
    assert all(error and error.startswith("ConfigError: ") for error in errors), job.results[0].get("traceback", errors)
    assert any(setting in error and "; set " in error for setting in REFUSABLE for error in errors)
    assert all("losses" not in result for result in job.results)
    assert order.options["strategy"]["schedule"] not in SYNCHRONOUS, "synchronous schedules bear all of this"
    return True


def params() -> list[Any]:
    found = []
    for seed in range(FIRST, FIRST + COUNT):
        case = drawn(seed)
        found.append(pytest.param(case, id=f"{seed}-{case.pipeline.options['strategy']['schedule']}"))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", params())
def test_a_random_script_equals_its_reference_or_is_refused(farm: Farm, case: Case) -> None:
    job = farm.start(case.pipeline)
    if is_refused(job, case.pipeline):
        return
    single, ranks = farm.start(case.single).outcome[0], job.outcome
    accumulates = case.single.options["trainer"].get("accumulate_grad_batches", 1) > 1
    if case.is_late:
        decides = case.single.options["scheduler"] == "plateau"  # by its own metrics
        assert_late_script(ranks[0] if decides else single, ranks, case.pipeline, exact=not accumulates)
    else:
        assert_same_script(single, ranks)
    if case.resumed_at is not None and not accumulates:
        assert_continues(farm, case, job, single)


def assert_continues(farm: Farm, case: Case, job: Job, single: dict[str, Any]) -> None:
    """From a checkpoint within an epoch, under another plan: the same loss curve, or the rule's from there on."""
    kept = {torch.load(file, weights_only=True)["global_step"]: file for file in (job.folder / "kept").glob("*.ckpt")}
    steps = [step for step in sorted(kept) if step < single["steps"]]
    if not steps:
        return
    step = steps[case.resumed_at % len(steps)]  # type: ignore[operator]
    order = case.resumed.over(case.resumed.ranks, ckpt_path=str(kept[step]))
    again = farm.start(order)
    if is_refused(again, order):
        return
    ranks = again.outcome
    assert ranks[0]["batches_seen"] == single["batches_seen"][step:]
    if case.is_late:
        losses, weights = late_run(ranks, order, start=torch.load(kept[step], weights_only=True))
        assert_like({name: ranks[0]["weights"][name] for name in weights}, weights, "weights")
    else:
        losses = single["losses"][step:]
        assert_like(ranks[0]["weights"], single["weights"], "weights")
    assert ranks[0]["losses"] == pytest.approx(losses, abs=2e-6, rel=0)
    assert {found["steps"] for found in ranks} == {single["steps"]}
