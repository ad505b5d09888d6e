"""`sma`: synchronous model averaging (KungFu, OSDI'20). Each step pulls a worker towards the mean of all.

x_i ← (1 - pull) x_i + pull · mean(x)     while backward runs, for which x does not change
x_i ← x_i - update of its own gradient at the former x_i
"""

import time

from pl_pipe.comm.summing import Pending, Summing
from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.errors import ConfigError

PULL = 0.1


def check_pull(pull: float) -> None:
    if not isinstance(pull, int | float) or not 0 < pull <= 1:
        raise ConfigError(f"pull={pull!r}; give a share of the mean above 0 and up to 1, such as {PULL}")


class ModelAveraging(PacedRule):
    lockstep = True

    def __init__(self, worker: Worker, summing: Summing, *, pull: float = PULL, every: int = 1) -> None:
        check_pull(pull)
        super().__init__(worker, every=every)
        self._summing, self._pull = summing, pull
        self._flat = FlatTensors(worker.parameters.values())
        self._sum = self._flat.empty()
        self._own = self._flat.empty()
        self._pending: Pending | None = None

    def begin_backward(self) -> None:
        if not self._pace.is_last:
            return
        self._flat.read(self._own)
        self._sum.copy_(self._own)
        self._pending = self._summing.start(self._sum)

    def before_update(self) -> None:
        if self._pending is None:
            return
        start_s = time.perf_counter()
        self._pending.wait()
        self._pending = None
        mean = self._sum.div_(len(self.worker.workers))
        self._flat.write(self._own.lerp_(mean, self._pull))
        self.facts = StepFacts(self.worker.workers, time.perf_counter() - start_s)

    def after_update(self) -> None:
        self._pace.updated()
