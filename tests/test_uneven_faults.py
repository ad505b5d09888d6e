"""A worker that ends: the others go on without it, or stop with its name. And what is refused."""

from collections import Counter
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from pipedream_farm import Farm, Order
from pipedream_models import make

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import (
    ADPSGDStrategy,
    DataParallelStrategy,
    HetPipeStrategy,
    PartialReduceStrategy,
    SDPipeStrategy,
)
from pl_pipe.strategies.peer_faults import PeerError, PeerFaults
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher
from pl_pipe.strategies.uneven.membership import Membership
from pl_pipe.strategies.uneven.settings import UnevenSettings

pytest_plugins = "pipedream_plugin"

DATA = {"samples": 90}
SLOW = dict.fromkeys("0123", 0.01)
SURVIVING = [
    pytest.param("partial_reduce", {}, "SIGKILL", id="partial-reduce"),
    pytest.param("ad_psgd", {}, "SIGKILL", id="ad-psgd", marks=pytest.mark.slow),
    pytest.param("data_parallel", {"synchronizer": "pair"}, "SIGKILL", id="pair", marks=pytest.mark.slow),
    pytest.param("partial_reduce", {}, "raise", id="an-error-of-its-own", marks=pytest.mark.slow),
]


def struck(strategy: str, options: dict[str, Any], how: str, *, rank: int = 2, ranks: int = 4, **strike: Any) -> Order:
    calls, answers = strike.pop("calls", 1), how not in ("SIGKILL", "SIGSTOP", "sleep")
    return Order(
        "uneven_tasks.fit", ranks=ranks, strategy=strategy, options=options, data=DATA, slow=SLOW, calls=calls,
        strike={"rank": rank, "how": how, "batch": 2, **strike}, lost=[] if answers else [rank],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "order"),
    [pytest.param(p.values[2], struck(*p.values), id=str(p.id), marks=p.marks) for p in SURVIVING],
)
def test_the_others_go_on(farm: Farm, how: str, order: Order) -> None:
    job = farm.start(order)
    found = [notes for rank, notes in enumerate(job.results) if how == "SIGKILL" or rank != 2]
    for notes in found:
        assert "error" not in notes, notes["traceback"]
        assert notes["epoch"] == 2
        assert torch.equal(notes["weights"]["layers.0.0.weight"], found[0]["weights"]["layers.0.0.weight"])
        assert [m["val_acc"] for m in notes["validated"]] == [m["val_acc"] for m in found[0]["validated"]]
        assert notes["metrics"]["sync/workers"] == 3
    together = sum((samples(notes["batches"][1]) for notes in found), Counter())
    assert len(together) == 90, "the second epoch has all data, without the one that is gone"
    if how == "raise":
        assert job.results[2]["error"].startswith("MemoryError: 12 GiB wanted")
    assert "training goes on with 3 worker(s)" in (job.folder / "rank0.log").read_text()


def samples(batches: list[Any]) -> Counter[tuple[float, ...]]:
    return Counter(tuple(row.tolist()) for x, _ in batches for row in x)


ENDING = [
    pytest.param(struck("partial_reduce", {"on_fault": "stop"}, "SIGKILL"), 2, id="by-option"),
    pytest.param(
        struck("data_parallel", {"synchronizer": "allreduce"}, "SIGKILL", ranks=3),
        2,
        id="allreduce",
        marks=pytest.mark.slow,
    ),
    pytest.param(struck("hetpipe", {"wave": 1}, "SIGKILL", ranks=3), 2, id="hetpipe", marks=pytest.mark.slow),
    pytest.param(struck("partial_reduce", {}, "SIGKILL", rank=0, ranks=3), 0, id="rank-0", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("order", "rank"), ENDING)
def test_the_others_stop_with_its_name(farm: Farm, order: Order, rank: int) -> None:
    for error in farm.start(order).errors:
        assert error.startswith(f"PeerError: rank {rank} is gone: its process ended without a word"), error


STANDING = [
    ("SIGSTOP", "PeerError: rank 1 has given no sign of life for 6 s"),
    ("sleep", "PeerError: rank 1 has held up the others for 6 s, standing at uneven_tasks.py"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "words"),
    [
        pytest.param(struck("partial_reduce", {"timeout_s": 6.0}, how, rank=1, ranks=3, batch=1), words, id=how)
        for how, words in STANDING
    ],
)
def test_a_worker_that_stands_still_ends_the_run(farm: Farm, order: Order, words: str) -> None:
    """Its process is stopped, or lives and does nothing; it may hold what others wait for."""
    for error in farm.start(order).errors:
        assert error.startswith(words), error


@pytest.mark.parametrize("order", [struck("partial_reduce", {}, "SIGTERM", rank=0, ranks=2, uniting=True)])
def test_a_signal_while_all_meet_is_served(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    for error in job.errors:
        assert error.startswith("SIGTERMException"), error


@pytest.mark.slow
@pytest.mark.parametrize("order", [struck("partial_reduce", {}, "SIGKILL", ranks=3, calls=2)])
def test_survivors_cannot_begin_again(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert error.startswith("ConfigError: rank(s) 2 ended in an earlier call of this trainer"), error


@pytest.mark.slow
@pytest.mark.parametrize("order", [struck("partial_reduce", {}, "save", rank=0, ranks=2)])
def test_nothing_is_saved_within_an_epoch_and_it_is_said(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    assert job.outcome[0]["epoch"] == 2
    assert not (job.folder / "within.ckpt").exists()
    assert "within.ckpt is not saved: within an epoch" in (job.folder / "rank0.log").read_text()


BETWEEN = [
    pytest.param(struck("partial_reduce", {}, "SIGKILL", ranks=3, evaluating=True), id="validation"),
    pytest.param(struck("partial_reduce", {}, "SIGKILL", ranks=3, uniting=True), id="reunion"),
    pytest.param(struck("ad_psgd", {}, "SIGKILL", ranks=3, rank=1, uniting=True), id="reunion-ad-psgd"),
]


@pytest.mark.slow
@pytest.mark.parametrize("order", BETWEEN)
def test_a_worker_may_end_between_steps(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    for notes in found:
        assert notes["epoch"] == 2
        assert torch.equal(notes["weights"]["layers.0.0.weight"], found[0]["weights"]["layers.0.0.weight"])


@pytest.mark.parametrize(
    "order", [Order("uneven_tasks.fit", ranks=2, strategy="partial_reduce", options={}, differ=True)]
)
def test_different_models_are_refused_by_name(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert error.startswith("ConfigError: the workers have different models: layers.0.0.weight is float32 [8, 6]")
        assert "absent on rank 1" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "words"),
    [
        (struck("partial_reduce", {}, "SIGTERM", rank=1, ranks=3), "SIGTERMException"),
        (struck("ad_psgd", {}, "SIGINT", rank=0, ranks=3), "SystemExit"),
    ],
)
def test_a_signal_to_one_ends_all(farm: Farm, order: Order, words: str) -> None:
    for error in farm.start(order).errors:
        assert error.startswith(words), error


REFUSED = [
    ({"trainer": {"val_check_interval": 0.5}}, "val_check_interval=0.5"),
    ({"checkpoint": {"every_n_train_steps": 2}}, "every_n_train_steps=2"),
    ({"data": {"sizes": [3, 5]}}, "batch sampler of its own"),
    ({"model": "Manual"}, "automatic_optimization=False"),
    ({"optimizer": "lbfgs"}, "LBFGS"),
    ({"strategy": "ad_psgd", "options": {"matching": True}}, "there are 3; take an even number"),
    ({"strategy": "hetpipe", "options": {"servers": 4}}, "servers=4; give a number from 1 to 3"),
]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        pytest.param(
            Order("uneven_tasks.fit", ranks=3, **{"strategy": "partial_reduce", **case}),
            words,
            id=words.split("=")[0],
            marks=[pytest.mark.slow] if number else [],
        )
        for number, (case, words) in enumerate(REFUSED)
    ],
)
def test_what_needs_workers_in_step_is_refused(farm: Farm, order: Order, words: str) -> None:
    """By all; a rank that comes to it late may hear of it from another first."""
    for error in farm.start(order).errors:
        assert error.startswith(("ConfigError", "PeerError: rank ")), error
        assert "ConfigError" in error
        assert words in error


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        (PartialReduceStrategy(), 1, "and there is 1; set trainer.devices=2 or more"),
        (ADPSGDStrategy(matching=True), 3, "there are 3; take an even number"),
        (HetPipeStrategy(servers=4), 3, "servers=4; give a number from 1 to 3"),
        (SDPipeStrategy("wave", servers=4), 4, "servers=4; give a number from 1 to 2"),
    ],
)
def test_numbers_of_workers_are_refused_before_any_process_starts(strategy: Any, devices: int, words: str) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    started = AssertionError("processes are started")
    with (
        mock.patch.object(PipelineLauncher, "_call_children_scripts", side_effect=started),
        pytest.raises(ConfigError, match=words),
    ):
        trainer.fit(make("Mlp"))


@pytest.mark.parametrize("order", [Order("uneven_tasks.fit", ranks=1, strategy="partial_reduce")])
def test_one_worker_is_refused(farm: Farm, order: Order) -> None:
    (error,) = farm.start(order).errors
    assert "averages among workers, and there is 1; set trainer.devices=2" in error


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: PartialReduceStrategy(first_wait_s=0.0), "first_wait_s=0.0: with no time to wait"),
        (lambda: PartialReduceStrategy(averaging="median"), "averaging=median is unknown"),
        (lambda: PartialReduceStrategy(wave=3), "wave=3 is an option of synchronizer=wave"),
        (lambda: PartialReduceStrategy(groups=3), "groups=3 is no option of PartialReduceStrategy"),
        (lambda: ADPSGDStrategy(matching=True, on_fault="leave"), "on_fault=leave, but synchronizer=ad_psgd with"),
        (lambda: HetPipeStrategy(on_fault="leave"), "waits for every worker"),
        (lambda: DataParallelStrategy("ring"), "synchronizer=ring is unknown"),
        (lambda: HetPipeStrategy(timeout_s=0), "timeout_s=0"),
        (lambda: HetPipeStrategy(wave=0), "wave=0; give the number of steps"),
        (lambda: HetPipeStrategy(distance=-1), "distance=-1; give a number of waves"),
        (lambda: DataParallelStrategy("sma", pull=0), "pull=0; give a share"),
        (lambda: PartialReduceStrategy(group_size=1), "group_size=1; give a number of 2 or more"),
        (lambda: PartialReduceStrategy(alpha=0.3), "alpha=0.3 is for averaging=dynamic"),
        (lambda: PartialReduceStrategy(every=0), "every=0; give the number of updates after which workers average, 1"),
        (lambda: ADPSGDStrategy(every=1.5), "every=1.5; give the number of updates"),
        (lambda: DataParallelStrategy("sma", every=True), "every=True; give the number of updates"),
        (
            lambda: HetPipeStrategy(every=3),
            "every=3 is an option of synchronizer=partial_reduce or ad_psgd or pair or sma, and this run has "
            "synchronizer=wave; set wave=3",
        ),
        (lambda: DataParallelStrategy("allreduce", every=3), "=allreduce; set trainer.accumulate_grad_batches=3"),
        (lambda: DataParallelStrategy("local", every=3), "=local; leave it out"),
    ],
)
def test_options_that_mean_nothing_are_refused(strategy: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        strategy()


@pytest.mark.parametrize(("error", "told"), [(PeerError("rank 2 is gone"), True), (ValueError("mine"), False)])
def test_a_worker_that_ends_of_anothers_fault_says_that_it_ends_too(error: Exception, told: bool) -> None:
    """The others may go on without the rank it names, and would wait for this one. An error of its own it has told."""
    faults, member = mock.Mock(spec=PeerFaults), Membership(UnevenSettings(timeout_s=20.0))
    with mock.patch("pl_pipe.strategies.uneven.membership.interrupt_groups") as interrupted:
        member.fail(error, faults)
    assert faults.tell_own.call_args_list == ([mock.call(error)] if told else [])
    assert interrupted.called
