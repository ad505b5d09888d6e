"""torchrun agents that come and go as a run asks. ElasticPolicy ─ requests in a file ─► *Agents* ─► torchrun.

{"number": 1, "workers": 3, "go": false} ─► a third agent is started, and the answer is written when it could begin
{"number": 2, "workers": 3, "go": true}  ─► it begins; torchrun starts all workers anew, now three
{"number": 3, "workers": 2, "go": true}  ─► the third is ended, then the answer is written, and workers start anew
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pl_pipe.adapt.provisioner import PLACE, FileProvisioner
from pl_pipe.lab.consequences import ended

RENDEZVOUS = "last_call_timeout=1,join_timeout=300,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Agents that have gone are noticed after three seconds, and a new round waits for latecomers for one."""
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Agents that share their store tell its address in the first round only: one that comes later would wait in vain."""
_POLL_S = 0.1
_END_S = 5.0
_GONE_WITHIN_S = 3.0
_OTHERS_END_WITHIN_S = 30.0

Start = Callable[[int, Mapping[str, str]], "subprocess.Popen[Any]"]
"""Starts the agent of a place, in a session of its own, with some more variables in its environment."""


def elastic_launcher(
    program: list[str], *, least: int, most: int, endpoint: str, run: str, address: str, is_first: bool
) -> list[str]:
    """The command line of one agent among `least` to `most`, each of one worker; the first one is where all meet, to
    the end."""
    meeting = f"{RENDEZVOUS},is_host={is_first:d}"  # torchrun would ask for the machine's name, which hosts share
    return [
        *("-m", "pl_pipe.adapt.agent", "--nnodes", f"{least}:{most}", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run, "--rdzv-conf", meeting),
        *("--local-addr", address, *program),
    ]


class Agents:
    """Starts the first ones, and then as many as the run asks for."""

    def __init__(self, start: Start, requests: Path, *, say: Callable[[str], None]) -> None:
        self._start, self._requests, self._say = start, FileProvisioner(requests), say
        self._running: list[subprocess.Popen[Any]] = []
        self._waiting: list[subprocess.Popen[Any]] = []
        """Of the places behind those that run: started, and not yet asked for."""
        self._answered = 0

    def serve(self, first: int, *, most: int = 0) -> int:
        """Until all have ended; the exit code is that of the first one that failed, or 0.

        One more than the first, of `most` at most, is started with them and waits: it imports before there is training
        that would go slower by it, or stand still for it.
        """
        try:
            self._become(first)
            self._prepared(min(first + 1, most))
            while any(agent.poll() is None for agent in self._running):
                self._answer()
                self._let_go_of_waiting()
                failed = _first_failed([*self._running, *self._waiting])
                if failed is not None:
                    break
                time.sleep(_POLL_S)
            else:
                failed = _first_failed(self._running)  # one that waits is not needed any more
            if failed is None:
                return 0
            place, code = failed
            self._say(f"agent {place} {ended(code)}; the others have {_OTHERS_END_WITHIN_S:g} s to end")
            self._wait(_OTHERS_END_WITHIN_S)
            return _exit_code(code)
        finally:
            self._become(0)

    def _answer(self) -> None:
        asked = self._requests.asked()
        if asked["number"] <= self._answered:
            return
        if asked["go"]:
            self._say(f"{len(self._running)} -> {asked['workers']} agent(s)")
            self._become(asked["workers"])
        elif not self._prepared(asked["workers"]):
            return
        self._answered = asked["number"]
        partial = self._requests.answer.with_suffix(".partial")
        partial.write_text(json.dumps({"number": asked["number"]}))
        partial.replace(self._requests.answer)

    def _prepared(self, number: int) -> bool:
        places = range(len(self._running), number)
        for place in places[len(self._waiting) :]:
            self._requests.forget(place)  # one that was ended while it waited
            self._waiting.append(self._start(place, {PLACE: str(place)}))
        return all(self._requests.is_waiting(place) for place in places)

    def _let_go_of_waiting(self) -> None:
        """One that has failed while nobody asks for it is no failure of the run: another is started when it is."""
        gone = next((place for place, agent in enumerate(self._waiting) if agent.poll() is not None), None)
        if gone is None or self._requests.asked()["number"] > self._answered:
            return
        self._say(f"agent {len(self._running) + gone}, which waited, {ended(self._waiting[gone].returncode)}")
        for agent in self._waiting[gone:]:
            _end(agent)
        del self._waiting[gone:]

    def _become(self, number: int) -> None:
        while self._waiting and len(self._running) < number:
            self._running.append(self._waiting.pop(0))
        leaving = [*self._running[number:], *self._waiting]
        del self._running[number:]
        self._waiting.clear()
        for agent in reversed(leaving):
            _end(agent)
        while len(self._running) < number:
            self._running.append(self._start(len(self._running), {}))

    def _wait(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while any(agent.poll() is None for agent in self._running) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _first_failed(agents: "Sequence[subprocess.Popen[Any]]") -> tuple[int, int] | None:
    """By place, with its exit code."""
    return next(((place, agent.returncode) for place, agent in enumerate(agents) if agent.poll()), None)


def _end(agent: "subprocess.Popen[Any]") -> None:
    """The agent ends its workers first; whoever is left of its session after that is killed, and has gone on return."""
    agent.terminate()
    with suppress(subprocess.TimeoutExpired):
        agent.wait(_END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    deadline_s = time.monotonic() + _GONE_WITHIN_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline_s:
            os.killpg(agent.pid, 0)  # a killed one is there for a moment, on a busy machine for a while
            time.sleep(_POLL_S / 10)


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code  # a negative one is a signal's
