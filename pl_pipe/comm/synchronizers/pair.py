"""`pair`: a worker averages its own parameters with those that another one had last, which need not know (KungFu).

x_i ← (x_i + kept_j) / 2     j by a seeded draw; its service answers at once with what it kept
x_i ← x_i - update           and keeps a copy for others
"""

import threading
import time
from random import Random

from torch import Tensor

from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.news import will_be_known
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.comm.synchronizers.service import TensorService
from pl_pipe.comm.transport import CommunicationError


class PairAveraging(PacedRule):
    survives = True

    def __init__(self, worker: Worker, *, seed: int = 0, every: int = 1) -> None:
        super().__init__(worker, every=every)
        self._draw = Random(f"{seed}/{worker.rank}")
        self._flat = FlatTensors(worker.parameters.values())
        self._own = self._flat.empty()
        self._kept = self._flat.read()
        self._lock = threading.Lock()
        self._service = TensorService(self, worker.peers(), dtype=self._flat.dtype, timeout_s=worker.timeout_s)

    def handle(self, source: int, operation: int, numbers: Tensor) -> Tensor:  # noqa: ARG002
        with self._lock:
            return self._kept.clone()

    def gone(self, source: int) -> None: ...

    def before_update(self) -> None:
        mine = self.worker.rank
        others = [worker for worker in self.worker.living if worker != mine]
        if not others or not self._pace.is_last:
            return
        partner, start_s = self._draw.choice(others), time.perf_counter()
        try:
            theirs = self._service.call(partner, 0)
        except CommunicationError:
            if not will_be_known(self.worker.is_gone, partner):
                raise
            return
        self._flat.read(self._own)
        self._flat.write(self._own.add_(theirs).mul_(0.5))
        self.facts = StepFacts(tuple(sorted((mine, partner))), time.perf_counter() - start_s)

    def after_update(self) -> None:
        self._pace.updated()
        self._keep()

    def resume(self) -> None:
        super().resume()
        self._keep()

    def close(self) -> None:
        self._service.close()

    def _keep(self) -> None:
        with self._lock:
            self._flat.read(self._kept)
