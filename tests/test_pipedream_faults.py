"""What can go wrong on one rank: every other rank ends soon, with an error that names the rank and its stage."""

from typing import Any

import pytest
from pipedream_farm import Farm, Order
from test_pipedream_checkpoints import assert_alike, content_of

pytest_plugins = "pipedream_plugin"

TIMEOUT_S = 120.0  # of a wait for another rank, unless a test says otherwise
SHORT_S = 6.0
SOON_S = 100.0  # a busy machine takes its time to start ranks, and still is quicker than the timeout
STAGES = {0: 2, 1: 1, 2: 0}
"""Of three ranks; rank 0 has the last stage, and the store."""
SAVING = {"every_n_train_steps": 2, "save_last": True, "filename": "{step}"}


def struck(
    rank: int | None, how: str, *, schedule: str = "pipedream", timeout_s: float = TIMEOUT_S, **options: Any
) -> Order:
    lost = [rank] if rank is not None and how in ("SIGKILL", "SIGSTOP", "sleep") else []
    strike = {"rank": rank, "how": how, **options.pop("strike", {})}
    strategy = {"schedule": schedule, "timeout_s": timeout_s}
    return Order(ranks=3, split=True, lost=lost, strike=strike, strategy=strategy, **options)


def assert_others_name(errors: list[str], rank: int, words: str) -> None:
    for error in errors:
        assert error.startswith(f"PeerError: rank {rank} (stage {STAGES[rank]}) {words}"), error


KILLED = [
    pytest.param(0, struck(0, "SIGKILL"), id="last-stage"),
    pytest.param(1, struck(1, "SIGKILL"), id="middle-stage"),
    pytest.param(2, struck(2, "SIGKILL"), id="first-stage"),
    pytest.param(1, struck(1, "SIGKILL", schedule="1f1b"), id="1f1b"),
    pytest.param(1, struck(1, "SIGKILL", data={"workers": 1}), id="with-loader-processes"),
    pytest.param(2, struck(2, "SIGKILL", strike={"evaluating": True, "batch": 0}), id="validation"),
]


@pytest.mark.parametrize(("rank", "order"), KILLED)
def test_a_killed_rank_is_named_by_all_others(farm: Farm, rank: int, order: Order) -> None:
    job = farm.start(order)
    assert_others_name(job.errors, rank, "is gone: its process ended without a word")
    assert job.seconds < SOON_S


BEHIND_A_SLEEPER = Order(
    ranks=3,
    split=True,
    lost=[1, 2],
    strike=[{"rank": 1, "how": "sleep", "batch": 2}, {"rank": 2, "how": "SIGKILL", "batch": 3}],
    strategy={"timeout_s": TIMEOUT_S},
)


@pytest.mark.parametrize("order", [BEHIND_A_SLEEPER])
def test_a_wait_for_a_rank_that_lives_is_interrupted(farm: Farm, order: Order) -> None:
    """Rank 0 waits for rank 1, which is busy; when rank 2 dies, neither of them need wait any longer."""
    job = farm.start(order)
    assert_others_name(job.errors, 2, "is gone")
    ended = (job.folder / "rank0.pt").stat().st_mtime - (job.folder / "struck2").stat().st_mtime
    assert ended < TIMEOUT_S / 2
    assert "PeerError: this rank (1) ends, since rank 2 (stage 0) is gone" in (job.folder / "rank1.log").read_text()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        pytest.param(struck(1, "memory"), "MemoryError: 12 GiB wanted", id="host-memory"),
        pytest.param(struck(1, "cuda memory"), "OutOfMemoryError: CUDA out of memory. Tried", id="device-memory"),
        pytest.param(
            Order(ranks=3, split=True, data={"kind": "unreadable"}), "OSError: sample 13 cannot be read", id="loader"
        ),
        pytest.param(
            Order(ranks=3, split=True, data={"kind": "unreadable", "workers": 1}),
            "OSError: Caught OSError in DataLoader worker",
            id="loader-process",
        ),
    ],
)
def test_a_failing_rank_tells_its_error_to_the_others(farm: Farm, order: Order, words: str) -> None:
    job = farm.start(order)
    first, failing, last = job.errors
    assert failing.startswith(words)
    assert_others_name([first, last], 1, f"failed: {words}")
    assert job.seconds < SOON_S


STOPPED = struck(1, "SIGSTOP", timeout_s=SHORT_S)
SLEEPING = struck(1, "sleep", timeout_s=SHORT_S)


@pytest.mark.parametrize("order", [STOPPED])
def test_a_stopped_rank_is_named_after_the_timeout(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    assert_others_name(job.errors, 1, f"has given no sign of life for {SHORT_S:g} s")
    assert SHORT_S < job.seconds < SHORT_S + SOON_S


@pytest.mark.parametrize("order", [SLEEPING])
def test_a_rank_that_holds_up_the_others_is_named_with_its_line(farm: Farm, order: Order) -> None:
    """The ranks that wait for it wait for each other as well; and it ends itself, though its main thread sleeps."""
    job = farm.start(order)
    assert_others_name(job.errors, 1, f"has held up the others for {SHORT_S:g} s, standing at pipedream_tasks.py:")
    assert job.seconds < 3 * SHORT_S + SOON_S
    assert "PeerError: this rank (1) ends, since rank 1 (stage 1) has held up" in (job.folder / "rank1.log").read_text()


UNEQUAL = Order(ranks=3, split=True, differ="length", validation=False)


@pytest.mark.parametrize("order", [UNEQUAL])
def test_unequal_lengths_are_refused_on_all_ranks(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert error.startswith("StageError: rank 1 has 4 training batches and rank 0 has 5, but"), error


UNKNOWN = UNEQUAL.over(3, data={"kind": "stream"}, strategy={"timeout_s": SHORT_S})


@pytest.mark.parametrize("order", [UNKNOWN])
def test_unequal_streams_end_after_the_timeout(farm: Farm, order: Order) -> None:
    """Only the data know their length: one rank ends its epoch while the others wait for its next batch."""
    job = farm.start(order)
    words = "see that all ranks have the same data and take the same number"
    assert any(words in error for error in job.errors), job.errors
    assert job.seconds < SHORT_S + SOON_S


EMPTY = Order(ranks=3, split=True, differ="empty", data={"kind": "stream"}, validation=False)


@pytest.mark.parametrize("order", [EMPTY])
def test_an_error_of_another_rank_while_planning_is_not_lost(farm: Farm, order: Order) -> None:
    """Rank 0, which plans, knows nothing of it."""
    first, failing, last = farm.start(order).errors
    words = "DataError: the data loader of fit_loop gave no batch, so there is nothing to plan with"
    assert failing == words
    for error in (first, last):
        assert error.startswith(f"PeerError: rank 1 failed: {words}"), error


NAN = Order(model="Diverges", validation=False, trainer={"max_epochs": 1})
ANOMALY = NAN.over(3, split=True, trainer={"max_epochs": 1, "detect_anomaly": True})


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [(NAN, NAN.over(3, split=True)), (NAN, NAN.over(3, split=True, strategy={"schedule": "1f1b"}))],
)
def test_a_loss_that_is_no_number_is_trained_on_as_by_one_process(farm: Farm, single: Order, pipeline: Order) -> None:
    """Lightning does not look at it, unless it is told to."""
    expected, found = farm.start(single).outcome[0], farm.start(pipeline).outcome[0]
    assert [loss == loss for loss in expected["losses"]] == [True, True, False, False, False]
    assert [loss == loss for loss in found["losses"]] == [True, True, False, False, False]


@pytest.mark.parametrize("order", [ANOMALY])
def test_a_rank_that_detects_it_ends_all(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    own = [rank for rank, error in enumerate(job.errors) if error.startswith("RuntimeError: Function")]
    assert len(own) == 1
    assert_others_name([e for rank, e in enumerate(job.errors) if rank != own[0]], own[0], "failed: RuntimeError: Func")
    assert job.seconds < SOON_S


# ---- signals


SIGTERM = {
    "checkpoint": {"save_on_exception": True, "filename": "{step}"},
    "data": {"samples": 60},
    "validation": False,
}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(struck(rank, "SIGTERM", schedule=schedule, **SIGTERM), id=f"{rank}-{schedule}")
        for rank, schedule in ((None, "pipedream"), (2, "pipedream"), (0, "1f1b"))
    ],
)
def test_all_ranks_end_before_the_same_batch_when_one_is_asked_to(farm: Farm, order: Order) -> None:
    """Drained, so that a callback may save; also when the first stage is ahead of the others."""
    job = farm.start(order)
    for error in job.errors:
        assert error.startswith("SIGTERMException"), error
    (step,) = {result["ended_at"] for result in job.results}
    assert 3 < step < 15
    assert content_of(job.folder / "kept" / f"step={step}.ckpt")["global_step"] == step
    assert job.seconds < SOON_S


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(struck(rank, "SIGINT", schedule=schedule, **SIGTERM), id=f"{rank}-{schedule}")
        for rank, schedule in ((None, "pipedream"), (0, "pipedream"), (1, "1f1b"))
    ],
)
def test_an_interrupt_ends_all_before_the_same_batch(farm: Farm, order: Order) -> None:
    """Ctrl-C, as the terminal sends it to all or a user to one of them: Lightning ends as it does with one process."""
    job = farm.start(order)
    assert job.errors == ["SystemExit: 1"] * 3
    (step,) = {result["ended_at"] for result in job.results}
    assert 3 < step < 15
    assert content_of(job.folder / "kept" / f"step={step}.ckpt")["global_step"] == step
    assert job.seconds < SOON_S


AT_ONCE = struck(1, "SIGINT SIGINT", **SIGTERM)


@pytest.mark.parametrize("order", [AT_ONCE])
def test_a_second_interrupt_ends_all_at_once_and_saves_nothing(farm: Farm, order: Order) -> None:
    """Others may be anywhere then; a callback that wants to save is not waited for."""
    job = farm.start(order)
    first, interrupted, last = job.errors
    assert interrupted == "SystemExit: 1"
    assert_others_name([first, last], 1, "failed: KeyboardInterrupt")
    assert not list((job.folder / "kept").glob("*"))
    assert "is not saved" in (job.folder / "rank0.log").read_text()


LAST = struck(1, "SIGINT", strike={"batch": 4}, validation=False, trainer={"max_epochs": 1})
VALIDATING = struck(None, "SIGINT", strike={"evaluating": True, "batch": 0})


@pytest.mark.parametrize("order", [LAST, VALIDATING])
def test_an_interrupt_without_a_next_batch_is_not_forgotten(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    assert all(error == "SystemExit: 1" or "failed: KeyboardInterrupt" in error for error in job.errors), job.errors
    assert "SystemExit: 1" in job.errors
    assert job.seconds < SOON_S


REQUEUED = struck(None, "SIGUSR1", slurm=True, validation=False, data={"samples": 60}, trainer={"max_epochs": 1})


@pytest.mark.parametrize("order", [REQUEUED])
def test_a_requeued_slurm_job_saves_once_at_an_agreed_batch(farm: Farm, order: Order) -> None:
    """All ranks get the signal, at different moments of their steps; training goes on until SLURM ends it."""
    job = farm.start(order)
    assert [result["steps"] for result in job.outcome] == [15, 15, 15]
    assert (job.folder / "scontrol.txt").read_text() == "requeue 77\n"
    (saved,) = job.folder.glob("hpc_ckpt_*.ckpt")
    assert 3 < content_of(saved)["global_step"] < 15


# ---- afterwards


RESUMED: dict[str, Any] = {"optimizer": "adamw", "scheduler": "step", "validation": False, "seed": 3}
DYING = struck(1, "SIGKILL", schedule="1f1b", checkpoint=SAVING, **RESUMED)


@pytest.mark.parametrize("order", [DYING])
def test_the_last_checkpoint_of_a_killed_run_continues(farm: Farm, order: Order) -> None:
    """As one process continues from it."""
    job = farm.start(order)
    assert job.errors
    path = job.folder / "kept" / "last.ckpt"
    assert content_of(path)["global_step"] == 2
    rest = Order(ckpt_path=str(path), **RESUMED)
    single, pipeline = farm.start(rest), farm.start(rest.over(3, split=True, strategy={"schedule": "1f1b"}))
    expected = single.outcome[0]
    assert len(expected["losses"]) == 8
    assert pipeline.outcome[0]["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    for found in pipeline.outcome:
        assert_alike(found["weights"], expected["weights"])
    assert pipeline.outcome[0]["checkpoint_io"] == "AtomicCheckpointIO"  # a kill while saving leaves the old file
