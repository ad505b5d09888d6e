"""Pipelines over real processes, quickly: one server imports Lightning once, and forks the ranks of every job.

    Farm (in pytest) ── job: task, ranks, options ──►  server (this file as a script)
                                                         ├── rank 0 ─┐  gloo, one thread each, an own port and folder
                                                         ├── rank 1 ─┤
                     ◄── ended, or killed in time ───    └── …      ─┘  results: <folder>/rank0.pt, output: rank0.log

The server does no torch work of its own, so that forking it is safe.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from free_port import free_port

JOB_TIMEOUT_S = 180.0
RANKS_AT_ONCE = int(os.environ.get("FARM_RANKS_AT_ONCE", "8"))
MARK = "PL_PIPE_TEST_MARK"


# ---- the side of the tests


class Order:
    """A job to be done. Tests have orders among their parameters, so that all can be placed before the first waits."""

    def __init__(
        self,
        task: str = "fit",
        *,
        ranks: int = 1,
        timeout_s: float = JOB_TIMEOUT_S,
        lost: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """`lost` ranks die or stop on purpose: they need no result; one that is stopped is killed after the others."""
        self.task, self.ranks, self.timeout_s, self.lost, self.options = task, ranks, timeout_s, list(lost), options

    def over(self, ranks: int, **options: Any) -> "Order":
        """The same with so many ranks, and further options."""
        return Order(self.task, ranks=ranks, timeout_s=self.timeout_s, lost=self.lost, **{**self.options, **options})

    @property
    def key(self) -> str:
        return json.dumps([self.task, self.ranks, self.lost, self.options], sort_keys=True)


class Job:
    """Ranks that run one task."""

    def __init__(self, farm: "Farm", number: int, folder: Path, order: Order) -> None:
        self.folder, self.ranks, self.lost = folder, order.ranks, order.lost
        self._farm, self._number = farm, number

    @property
    def seconds(self) -> float:
        return float(self._farm.answer(self._number)["seconds"])

    @property
    def results(self) -> list[dict[str, Any]]:
        """What each rank returned, but for those that were to be lost; a rank that raised has `error`."""
        import torch

        killed = self._farm.answer(self._number)["killed"]
        found = []
        for rank in set(range(self.ranks)) - set(self.lost):
            path = self.folder / f"rank{rank}.pt"
            log = self.folder / f"rank{rank}.log"
            assert path.exists(), (
                f"rank {rank} of {self.folder} ended without a result{f', killed were {killed}' if killed else ''}: "
                f"{log.read_text()[-2000:] if log.exists() else 'no output'}"
            )
            found.append(torch.load(path, weights_only=False))
        return found

    @property
    def outcome(self) -> list[dict[str, Any]]:
        """The results of ranks that must not have failed."""
        found = self.results
        for rank, result in enumerate(found):
            assert "error" not in result, f"rank {rank}: {result.get('traceback')}"
        return found

    @property
    def errors(self) -> list[str]:
        """The errors of ranks that must all have failed."""
        found = self.results
        for rank, result in enumerate(found):
            assert "error" in result, f"rank {rank} did not fail"
        return [result["error"] for result in found]


class Farm:
    """Starts jobs and waits for them; equal jobs run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, Job] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self.mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "HYDRA_"))}
        environment.update({MARK: self.mark, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, order: Order, *, urgent: bool = True) -> Job:
        """Returns at once; the server begins when ranks are free, with what is urgent first."""
        if order.key not in self._jobs:
            number = len(self._jobs)
            folder = self._folder / f"{number:03d}-{order.task}-{order.ranks}"
            folder.mkdir()
            self._jobs[order.key] = Job(self, number, folder, order)
            content = {"number": number, "folder": str(folder), "urgent": urgent, **vars(order)}
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(content) + "\n")
            self._server.stdin.flush()
        return self._jobs[order.key]

    def answer(self, number: int) -> dict[str, Any]:
        with self._arrived:
            came = self._arrived.wait_for(lambda: number in self._answers or None in self._answers, timeout=900)
        assert came, f"job {number} did not end in time"
        assert number in self._answers, "the server has ended"
        return self._answers[number]

    def close(self) -> int:
        """Ends the server, which ends its ranks; returns its exit code."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            return self._server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            return self._server.wait()

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            answer = json.loads(line)
            with self._arrived:
                self._answers[answer["number"]] = answer
                self._arrived.notify_all()
        with self._arrived:
            self._answers[None] = {}  # type: ignore[index]
            self._arrived.notify_all()


# ---- the server


@dataclass
class _Running:
    number: int
    began: float
    deadline: float
    alive: dict[int, int] = field(default_factory=dict)
    """Process ids and their ranks."""
    stopped: set[int] = field(default_factory=set)
    killed: list[int] = field(default_factory=list)


def serve() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    # What ranks would otherwise import each for themselves.
    import lightning_task  # noqa: F401
    import pipedream_tasks  # noqa: F401
    import torch._dynamo  # noqa: F401 - the first optimizer would
    import torchmetrics.classification  # noqa: F401

    gc.collect()
    gc.freeze()
    waiting: deque[dict[str, Any]] = deque()
    running: list[_Running] = []
    rest, listening = b"", True
    while listening or waiting or running:
        if listening and select.select([0], [], [], 0.01 if running or waiting else None)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                listening = False
                waiting.clear()
                for job in running:
                    _kill(job)
            *lines, rest = (rest + chunk).split(b"\n")
            for order in map(json.loads, lines):
                _import_of(order["task"])
                waiting.appendleft(order) if order["urgent"] else waiting.append(order)
        elif not listening:
            time.sleep(0.01)
        busy = sum(len(job.alive) for job in running)
        while waiting and (not running or busy + waiting[0]["ranks"] <= RANKS_AT_ONCE):
            running.append(_forked(waiting.popleft()))
            busy += len(running[-1].alive)
        for job in running:
            _look_after(job)
        for job in [job for job in running if not job.alive]:
            running.remove(job)
            answer = {"number": job.number, "seconds": time.monotonic() - job.began, "killed": job.killed}
            with contextlib.suppress(BrokenPipeError):
                os.write(1, json.dumps(answer).encode() + b"\n")


def _import_of(task: str) -> None:
    """Once, instead of in each rank; what fails here fails there too, where it is reported."""
    module = task.rpartition(".")[0]
    if module and module not in sys.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()


def _forked(order: dict[str, Any]) -> _Running:
    now = time.monotonic()
    job = _Running(order["number"], now, now + order["timeout_s"])
    port = free_port()
    for rank in range(order["ranks"]):
        child = os.fork()
        if not child:
            _rank(order, rank, port)
        job.alive[child] = rank
    return job


def _look_after(job: _Running) -> None:
    for child in list(job.alive):
        found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            job.stopped.add(child)
        elif found:
            del job.alive[child]
    if job.alive and job.stopped.issuperset(job.alive):
        for child in job.alive:
            os.kill(child, signal.SIGKILL)
    if job.alive and time.monotonic() > job.deadline and not job.killed:
        _kill(job)


def _kill(job: _Running) -> None:
    job.killed = sorted(job.alive.values())
    for child in job.alive:
        os.kill(child, signal.SIGKILL)


def _rank(order: dict[str, Any], rank: int, port: int) -> None:
    """The rest of a forked process's life."""
    folder = Path(order["folder"])
    result: dict[str, Any] = {}
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ["PL_PIPE_CACHE"] = str(folder / "cache")
        if order["ranks"] > 1:  # as Lightning's launcher would set them, so that it launches nothing
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
            os.environ.update(address, LOCAL_RANK=str(rank), WORLD_SIZE=str(order["ranks"]))
        import torch
        from pipedream_tasks import Rank, task_named

        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
        me = Rank(rank, order["ranks"], folder)
        try:
            result = task_named(order["task"])(me, **order["options"])
        except BaseException as error:
            me.notes["error"] = f"{type(error).__name__}: {error}"
            me.notes["traceback"] = traceback.format_exc()
            result = me.notes
        torch.save(result, folder / f"rank{rank}.partial")
        (folder / f"rank{rank}.partial").rename(folder / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a rank whose partner failed must not wait for it at exit


if __name__ == "__main__":
    serve()
