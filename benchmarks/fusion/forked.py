"""cell.py as a child of this process, which has its modules loaded: importing them takes longer than most cells do.

The driver never touches the GPU: a process that did could have no children that use it.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

_FORKS = multiprocessing.get_context("fork")
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


class Forked:
    """Has what is used of a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], out: TextIO, environment: Mapping[str, str]) -> None:
        import cell  # noqa: F401  once, for all that follow

        sys.stdout.flush()
        self._process = _FORKS.Process(target=_run, args=(list(arguments), out, dict(environment)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("cell.py", timeout or 0.0)
        return self._process.exitcode


def _run(arguments: list[str], out: TextIO, environment: dict[str, str]) -> None:
    import cell
    import torch
    import torch._inductor.config as compiler

    for stream in (1, 2):
        os.dup2(out.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when modules were loaded, as is the next
    compiler.compile_threads = int(environment[_THREADS])
    cell.main(arguments)
