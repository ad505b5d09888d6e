"""The processes of a run: each notes its id in the run's directory while it lives, so that `stop` can end them."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pl_pipe.cli.messages import rank_name
from pl_pipe.cli.run_directory import RunDirectory
from pl_pipe.errors import RunError


@dataclass(frozen=True)
class ProcessNote:
    """One process of a run. Its start time tells it from a later process that was given the same id."""

    pid: int
    started: float
    host: str
    rank: str

    @property
    def file_name(self) -> str:
        return f"{self.host}_{self.pid}.json"

    def alive(self) -> psutil.Process | None:
        """The process itself, if it is on this machine and still runs."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


@contextmanager
def noted_process(run: RunDirectory) -> Iterator[None]:
    """Notes this process in the run's directory for as long as the block runs."""
    me = psutil.Process()
    note = ProcessNote(pid=me.pid, started=me.create_time(), host=socket.gethostname(), rank=rank_name())
    run.processes.mkdir(parents=True, exist_ok=True)
    file = run.processes / note.file_name
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(note)))
    part.replace(file)  # `stop` may read at any moment
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # other processes of the run are still noted
            run.processes.rmdir()


def forget_processes(run: RunDirectory, pids: list[int]) -> None:
    """Removes the notes of processes on this machine that ended without doing so."""
    for pid in pids:
        (run.processes / f"{socket.gethostname()}_{pid}.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class StopOutcome:
    """What `stop` did."""

    ended: list[int]
    killed: list[int]
    elsewhere: list[str]
    """Hosts that have processes of the run too."""

    def describe(self, run_dir: Path) -> str:
        total = len(self.ended) + len(self.killed)
        text = (
            f"stopped {total} process(es) of {run_dir}"
            if total
            else f"nothing to stop: {run_dir} has no live process here"
        )
        if self.killed:
            text += f"; {len(self.killed)} did not end by themselves and were killed"
        if self.elsewhere:
            text += f"; run the same command on {', '.join(self.elsewhere)}"
        return text


def stop_run(run_dir: Path, *, grace_s: float) -> StopOutcome:
    """Ends the run's processes on this machine: asks them to stop, and kills those still there after `grace_s`."""
    if grace_s < 0:
        raise RunError(f"--grace-s {grace_s} is negative; 0 kills at once")
    folder = RunDirectory.open(run_dir).processes
    notes = _read_notes(folder)
    alive = [process for note in notes if (process := note.alive()) is not None]
    children = [child for process in alive for child in process.children(recursive=True)]  # data-loader workers
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    ended, left = psutil.wait_procs(alive, timeout=grace_s)
    orphans = [child for child in children if child not in alive and child.is_running()]
    for process in [*left, *orphans]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([*left, *orphans], timeout=5)
    for note in notes:
        if note.host == socket.gethostname():
            (folder / note.file_name).unlink(missing_ok=True)  # a killed process leaves its note behind
    elsewhere = sorted({note.host for note in notes} - {socket.gethostname()})
    return StopOutcome([process.pid for process in ended], [process.pid for process in left], elsewhere)


def _read_notes(folder: Path) -> list[ProcessNote]:
    notes = []
    for file in sorted(folder.glob("*.json")):
        try:
            notes.append(ProcessNote(**json.loads(file.read_text())))
        except (json.JSONDecodeError, TypeError) as error:
            raise RunError(f"{file} is damaged ({error}); remove it and end that process by hand") from error
        except FileNotFoundError:
            continue  # the process ended meanwhile
    return notes
