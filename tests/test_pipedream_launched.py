"""Faults under Lightning's own launcher: what reaches the terminal, and that no process stays behind.

Three processes import everything anew for each, which takes most of a minute on two cores; so most run with
`PL_PIPE_SLOW=1` only. The faults themselves are in test_pipedream_faults, on ranks that start quickly.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import child_environment, marked_processes
from test_pipedream_checkpoints import content_of

LIMIT_S = 600.0
AFTER_S = 300.0  # for the other ranks, once rank 0 has ended: they may still be importing
STAGES = {0: 2, 1: 1, 2: 0}
slow = pytest.mark.slow


def launched(folder: Path, *arguments: object, script: str = "launched_training.py") -> tuple[int, str]:
    """The exit code and the output of all ranks."""
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    environment = child_environment(PL_PIPE_TEST_MARK=mark, PL_PIPE_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), str(folder), *map(str, arguments)],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's signals go to its process group
        )
        try:
            code = process.wait(LIMIT_S)
            deadline = time.monotonic() + AFTER_S
            while marked_processes(mark) and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            process.poll()
            left = marked_processes(mark)
            for other in left:
                other.kill()
            process.wait()
    text = (folder / "output").read_text()
    assert not left, f"processes left behind: {left}\n{text[-3000:]}"
    return code, text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=slow)])
def test_a_killed_rank_is_named_and_nothing_stays(tmp_path: Path, rank: int) -> None:
    """Rank 0 is the parent of the others; Lightning would kill all before they could speak if another one dies."""
    code, text = launched(tmp_path, "SIGKILL", rank)
    assert code != 0
    words = f"PeerError: rank {rank} (stage {STAGES[rank]}) is gone: its process ended without a word"
    assert text.count(words) == 2, text[-3000:]
    assert "finished" not in text
    assert content_of(tmp_path / "kept" / "last.ckpt")["global_step"] == 6


@slow
def test_a_stopped_child_does_not_stay(tmp_path: Path) -> None:
    """It cannot end itself; rank 0 kills it in the end."""
    code, text = launched(tmp_path, "SIGSTOP", 2)
    assert code == 1
    assert text.count("PeerError: rank 2 (stage 0) has given no sign of life for 15 s") == 2, text[-3000:]


@pytest.mark.slow
@slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_ends_before_the_others_have_met_it(tmp_path: Path, rank: int) -> None:
    """There are no lifelines yet; nobody waits for the five minutes that ranks are given to come."""
    code, text = launched(tmp_path, "start", rank)
    assert code == (1 if rank else -9)
    assert ("ended with exit code 3" if rank else "rank 0 ended before the ranks had met") in text


@pytest.mark.slow
@slow
@pytest.mark.parametrize("what", ["terminal", "SIGINT"])
def test_ctrl_c_ends_all_quietly_and_saves(tmp_path: Path, what: str) -> None:
    """As the terminal sends it, and to rank 0 alone."""
    code, text = launched(tmp_path, what, 0, 2)
    assert code == 1
    assert text.count("Interrupted: all ranks end before the next batch") == 1
    assert "Traceback" not in text
    assert "finished" not in text
    (saved,) = (tmp_path / "interrupted").glob("*.ckpt")
    assert 7 < content_of(saved)["global_step"] < 15
