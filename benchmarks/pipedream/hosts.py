"""Hosts of a lab that run one training after another: benchmark -> *Hosts* -> a forked rank on every host.

    with Hosts(4) as hosts:
        hosts.set_rate(500e6)                        # bits a second, each way, of every host's link
        answers = hosts.run("rehearsed", **options)  # `ranks.rehearsed(**options)` on all hosts; rank by rank

A process takes seconds to import torch and Lightning, four on two cores take many; so every host has one that has done
so, and forks a rank for each training. It needs root and iproute2 (docs/lab.md).
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pl_pipe.cluster import LabConfig, LinkConfig
from pl_pipe.lab import Lab
from pl_pipe.lab.rehearsal import host_environment

HERE = Path(__file__).parent
_WHILE_NOBODY_TRAINS = 10e9
"""Bits a second: models are sent to all ranks before and after, which takes minutes over slow links."""


class Hosts:
    """A lab with one rank a host."""

    def __init__(self, count: int) -> None:
        self._lab = Lab(LabConfig(hosts=count))
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        with ExitStack() as lab:
            lab.enter_context(self._lab)
            self._start()
            self._removal = lab.pop_all()
        return self

    def _start(self) -> None:
        for number, host in enumerate(self._lab.hosts):
            environment = {
                **host_environment(self._lab, host, os.environ, cores=1),
                "MASTER_ADDR": self._lab.layout.address(self._lab.hosts[0]),
                "WORLD_SIZE": str(len(self._lab.hosts)),
                "NODE_RANK": str(number),
                "RANK": str(number),
                "LOCAL_RANK": "0",
            }
            server = self._lab.start(
                host, [sys.executable, str(HERE / "ranks.py")], environment=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,  # nothing read is hidden from `select`
            )  # fmt: skip
            self._servers.append(server)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._removal.__exit__(kind, error, where)

    def __len__(self) -> int:
        return len(self._lab.hosts)

    def set_rate(self, bits_per_s: float) -> None:
        self._rate = bits_per_s
        self._cap(bits_per_s)

    def _cap(self, bits_per_s: float) -> None:
        for host in self._lab.hosts:
            self._lab.set_link(host, LinkConfig(rate=f"{round(bits_per_s)}bit"))

    def run(self, work: str, *, timeout_s: float, waits: bool = True, **options: Any) -> list[Any]:
        """What `work` answers on every rank; raises what the first rank that failed said, and may be called again.

        Unless it `waits` for its links before and after training too, they have their rate while ranks say they train.
        """
        try:
            if not waits:
                self._cap(_WHILE_NOBODY_TRAINS)
            return self._answers(work, timeout_s, waits, options)
        except Exception:
            self._restart()
            raise

    def _restart(self) -> None:
        """Ends all ranks and starts new ones: others than the one that failed may wait for it, and answer too late."""
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # a session of its own, with the rank that it forked
            server.wait()
            for stream in (server.stdin, server.stdout):
                assert stream is not None
                with suppress(OSError):  # an order that it did not take
                    stream.close()
        self._servers.clear()
        self._start()

    def _answers(self, work: str, timeout_s: float, waits: bool, options: dict[str, Any]) -> list[Any]:
        order = json.dumps({"work": work, "port": random.randrange(20_000, 30_000), "options": options})
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.write(order.encode() + b"\n")
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        said: list[bool] = []
        waiting: dict[Any, int] = {server.stdout: rank for rank, server in enumerate(self._servers)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(waiting.values())))
                raise RuntimeError(f"rank {silent} did not answer within {timeout_s:g} s: {options}")
            for stream in ready:
                rank = waiting[stream]
                answer = json.loads(stream.readline() or '{"error": "its process ended"}')
                if "trains" in answer:
                    said.append(answer["trains"])
                    if not waits and said.count(answer["trains"]) == len(self._servers):
                        self._cap(self._rate if answer["trains"] else _WHILE_NOBODY_TRAINS)
                    continue
                del waiting[stream]
                if "error" in answer:  # others may wait for this one
                    raise RuntimeError(f"rank {rank} failed: {answer['error']}")
                answers[rank] = answer["answer"]
        return [answers[rank] for rank in range(len(self._servers))]
