"""Who starts and stops workers: the port, and what there is for it. elastic policy -> *Provisioner* -> lab, scripts.

The lab reads requests from a file. Users have a command, such as `./workers.sh {workers}`.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pl_pipe.errors import ConfigError

VARIABLE = "PL_PIPE_PROVISIONER"
"""Where a lab's file of requests is, for the ranks that it starts."""
PLACE = "PL_PIPE_AGENT_PLACE"
"""The place of an agent that is to wait until more workers than that are asked for."""

AGAIN = 75
"""The exit code with which a worker asks its agent to be started anew."""


class Provisioner(Protocol):
    """Asked by rank 0 alone; all ranks look whether the request has been met."""

    def check(self) -> None:
        """Raises where a request is bound to fail."""

    def prepare(self, workers: int) -> None:
        """There will soon be so many: those that are missing may start, and wait for the request; returns at once."""

    def is_prepared(self) -> bool:
        """Whether a request would find them started; true where nothing can be prepared."""

    def request(self, workers: int) -> None:
        """From now on there are to be so many; returns at once."""

    def latest(self) -> int:
        """The number of the latest request, by which the next one's answer is told from its own."""

    def is_done(self, *, after: int) -> bool:
        """Whether a later request than that has been met: those that were too many have gone, and those that were
        missing have been started. Where a rank cannot tell, it is false, and the rank waits to be ended."""

    def problem(self) -> str | None:
        """Why the request is not met, where that is known."""


class FileProvisioner:
    """Requests are `{"number": 3, "workers": 2, "go": true}` in a file, and answered by the number in `FILE.done`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def answer(self) -> Path:
        return self.path.with_name(self.path.name + ".done")

    def asked(self) -> dict[str, int]:
        """The latest request; number 0 is none."""
        found: dict[str, int] = json.loads(self.path.read_text()) if self.path.exists() else {"number": 0}
        return found

    def check(self) -> None:
        """Who has named the file reads it."""

    def problem(self) -> str | None:
        return None

    def prepare(self, workers: int) -> None:
        self._ask(workers, go=False)

    def is_prepared(self) -> bool:
        return 0 < self.latest() <= self._answered()

    def request(self, workers: int) -> None:
        self._ask(workers, go=True)

    def wants(self, place: int) -> bool:
        """Whether the agent of that place is to begin."""
        asked = self.asked()
        return bool(asked["number"] and asked["go"] and asked["workers"] > place)

    @contextmanager
    def waiting_at(self, place: int) -> Iterator[None]:
        """Of an agent that could begin."""
        self._sign(place).touch()
        yield
        self._sign(place).unlink()

    def is_waiting(self, place: int) -> bool:
        return self._sign(place).exists()

    def forget(self, place: int) -> None:
        """Nobody waits there."""
        self._sign(place).unlink(missing_ok=True)

    def _sign(self, place: int) -> Path:
        return self.path.with_name(f"{self.path.name}.waiting{place}")

    def _ask(self, workers: int, *, go: bool) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps({"number": 1 + self.asked()["number"], "workers": workers, "go": go}))
        partial.replace(self.path)

    def latest(self) -> int:
        return self.asked()["number"]

    def is_done(self, *, after: int) -> bool:
        return self._answered() > after

    def _answered(self) -> int:
        return int(json.loads(self.answer.read_text())["number"]) if self.answer.exists() else 0


class CommandProvisioner:
    """Runs a command of the user's, in which `{workers}` is the number wanted.

    It must return only when those that are too many have gone: the others start anew then, and would meet them again.
    That cannot be seen from here, where the ranks have parted already.
    """

    def __init__(self, command: str) -> None:
        if "{workers}" not in command:
            raise ConfigError(
                f"provisioner command {command!r} has no {{workers}} in it; write where the number of workers goes"
            )
        try:
            self._parts = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"provisioner command {command!r} cannot be read: {error}; mend its quotes") from error
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0

    def check(self) -> None:
        if shutil.which(self._parts[0]) is None:
            raise ConfigError(
                f"provisioner command {shlex.join(self._parts)!r}: there is no program {self._parts[0]!r} on rank 0's "
                f"host; install it, or give its whole path"
            )

    def prepare(self, workers: int) -> None:
        """A command is run once: what it starts would join at once."""

    def is_prepared(self) -> bool:
        return True

    def request(self, workers: int) -> None:
        self._requests += 1
        self._process = subprocess.Popen([part.replace("{workers}", str(workers)) for part in self._parts])

    def problem(self) -> str | None:
        code = None if self._process is None else self._process.poll()
        return f"provisioner command {shlex.join(self._parts)!r} ended with exit code {code}" if code else None

    def latest(self) -> int:
        return self._requests

    def is_done(self, *, after: int) -> bool:
        """The command has ended; ranks that have not started it cannot tell."""
        return self._process is not None and self._requests > after and self._process.poll() is not None


def provisioner_of(command: str | None) -> Provisioner:
    """The user's command, or the lab's file; refuses where there is neither."""
    if command is not None:
        return CommandProvisioner(command)
    path = os.environ.get(VARIABLE)
    if path is None:
        raise ConfigError(
            "nobody would start or stop workers: this run is not in a lab, and there is no command; run it by pl-pipe "
            "lab run, or set \"policy.provision.command='… {workers} …'\" (docs/adaptive.md)"
        )
    return FileProvisioner(Path(path))
