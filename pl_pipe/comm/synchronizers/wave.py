"""`wave`: wave-synchronous parallelism with a bound on the distance of clocks (HetPipe, ATC'20).

A wave is some steps on a worker's own parameters. At its end the worker hands in what they changed, divided by the
number of workers, to a parameter server; it waits while it is more than `distance` waves ahead of the slowest worker;
and it takes the server's parameters, in which its own changes are by then. The server is divided among workers, each of
which keeps a stretch of the numbers in the host's memory and serves it by threads.

    worker   step step step step │ hand in ─► tick … ─► take │ step step …
    server                            +=          clocks        copy
"""

import threading
import time

import torch
from torch import Tensor

from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.comm.synchronizers.service import TensorService
from pl_pipe.errors import ConfigError

STEPS = 4
_ADD, _TAKE = 1, 2


def check_steps(steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"wave={steps!r}; give the number of steps in a wave, 1 or more")


def check_servers(servers: int | None, workers: int) -> None:
    if servers is not None and (not isinstance(servers, int) or not 1 <= servers <= workers):
        raise ConfigError(f"servers={servers!r}; give a number from 1 to {workers}, the number of workers")


class Wave(PacedRule):
    def __init__(self, worker: Worker, *, steps: int = STEPS, servers: int | None = None) -> None:
        """
        Args:
            steps: of a wave.
            servers: how many workers keep a part of the parameters; by default all.
        """
        count = len(worker.workers)
        check_steps(steps)
        check_servers(servers, count)
        super().__init__(worker, every=steps)
        self._servers = worker.workers[: servers or count]
        self._flat = FlatTensors(worker.parameters.values())
        self._base = self._flat.read()
        """What the present wave began with."""
        self._shard = self._stretches(self._base)[self._place()].clone() if self._serves() else self._base[:0]
        self._lock = threading.Lock()
        self._service = TensorService(self, worker.peers(), dtype=self._flat.dtype, timeout_s=worker.timeout_s)

    # ---- the server's part, by threads of the service

    def handle(self, source: int, operation: int, numbers: Tensor) -> Tensor:  # noqa: ARG002
        with self._lock:
            if operation == _ADD:
                self._shard.add_(numbers)
                return torch.empty(0, dtype=self._flat.dtype)
            return self._shard.clone()

    def gone(self, source: int) -> None: ...

    # ---- the worker's

    def enter(self) -> None:
        self.worker.client.join()

    def after_update(self) -> None:
        if not self._pace.updated():
            return
        start_s = time.perf_counter()
        self._hand_in()
        ahead = self.worker.client.tick()
        self._take()
        self.facts = StepFacts(self.worker.workers, time.perf_counter() - start_s, ahead)

    def leave(self) -> None:
        """The rest of a wave is handed in too, but is no wave."""
        if self._pace.done:
            self._hand_in()
            self._pace.restart()
        self.worker.client.leave()

    def settle(self) -> None:
        self._take()

    def resume(self) -> None:
        super().resume()
        self._flat.read(self._base)
        if self._serves():
            with self._lock:
                self._shard.copy_(self._stretches(self._base)[self._place()])

    def close(self) -> None:
        self._service.close()

    def _hand_in(self) -> None:
        change = self._flat.read().sub_(self._base).div_(len(self.worker.workers))
        for server, part in zip(self._servers, self._stretches(change), strict=True):
            self._service.call(server, _ADD, part.contiguous())

    def _take(self) -> None:
        parts = [self._service.call(server, _TAKE) for server in self._servers]
        self._base = torch.cat(parts)
        self._flat.write(self._base)

    def _serves(self) -> bool:
        return self.worker.rank in self._servers

    def _place(self) -> int:
        return self._servers.index(self.worker.rank)

    def _stretches(self, flat: Tensor) -> list[Tensor]:
        return list(torch.tensor_split(flat, len(self._servers)))
