"""The launcher's last resort: when rank 0 is ended because a child has died, and when it is left alone."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from pl_pipe.strategies.peer_faults import PeerFaults
from pl_pipe.strategies.pipeline import launcher as pipeline_launcher
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher

LIMIT_S = 20.0


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineLauncher]:
    """Of two children: one that has failed, and one that stands still."""
    monkeypatch.setattr(pipeline_launcher, "_LOOK_S", 0.02)
    monkeypatch.setattr(pipeline_launcher, "_END_S", 0.2)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("os._exit", end)
    made = PipelineLauncher.__new__(PipelineLauncher)
    made._faults, made._failed, made._spares_others = PeerFaults(timeout_s=0.2), False, False
    made.procs = [subprocess.Popen(["false"]), subprocess.Popen(["sleep", "60"])]
    try:
        yield made
    finally:
        for child in made.procs:
            child.kill()
            child.wait()


def parted(launcher: PipelineLauncher) -> None:
    """The ranks had met, and this one has ended its run by now: its lifelines are closed."""
    launcher._faults.has_begun = launcher._faults.has_ended = True


def failed(launcher: PipelineLauncher) -> None:
    """The run has raised: its error is on the way to the user."""
    launcher._faults.has_begun = launcher._failed = True


@pytest.mark.parametrize("state", [parted, failed])
def test_a_rank_that_knows_of_the_fault_is_left_alone(
    launcher: PipelineLauncher, state: Callable[[PipelineLauncher], None]
) -> None:
    """It may be writing a file, or in the user's own `except`; at exit its children end."""
    state(launcher)
    launcher._observe_children()
    assert launcher.procs[1].poll() is None


def test_a_rank_has_time_to_notice_by_itself(launcher: PipelineLauncher) -> None:
    launcher._faults.has_begun = True
    threading.Timer(0.1, lambda: setattr(launcher._faults, "has_ended", True)).start()
    launcher._observe_children()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_rank_that_does_not_notice_is_ended(
    launcher: PipelineLauncher, capfd: pytest.CaptureFixture[str], has_begun: bool
) -> None:
    launcher._faults.has_begun = has_begun
    with pytest.raises(Ended):
        launcher._observe_children()
    assert "rank 1 (process " in (text := capfd.readouterr().err)
    assert "ended with exit code 1, and this rank did not end by itself" in text
    assert launcher.procs[1].wait(LIMIT_S) == -9


def test_children_that_end_well_end_the_observer(launcher: PipelineLauncher) -> None:
    launcher.procs[1].kill()
    launcher.procs[1].wait()
    launcher.procs = [subprocess.Popen(["true"])]
    launcher._observe_children()


def test_a_child_without_its_parent_ends_unless_the_ranks_have_met(launcher: PipelineLauncher) -> None:
    with pytest.raises(Ended):
        launcher._observe_parent(-1)
    launcher._faults.has_begun, launcher._faults.lifelines = True, None
    launcher._observe_parent(-1)


def test_at_exit_children_have_time_and_then_end(launcher: PipelineLauncher) -> None:
    children: Any = launcher.procs
    pipeline_launcher.end_at_exit(children)
    assert [child.wait(LIMIT_S) for child in children] == [1, -9]


def test_a_rank_that_is_alone_is_not_observed() -> None:
    """As with Lightning's own strategies on one device, no thread is left when the run is over."""
    alone = PipelineLauncher(
        LightningEnvironment(), 1, 1, faults=PeerFaults(timeout_s=1.0), explain=lambda error, _: error
    )
    assert alone.launch(lambda: [one.name for one in threading.enumerate()]).count("children-observer") == 0
