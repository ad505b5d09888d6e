"""`partial_reduce`: after its own updates a worker averages with those that are ready at about the same time.

Partial Reduce (SIGMOD'21) with SD-Pipe's groups (VLDB'23): `pl_pipe.grouping.former` says how they come about.
"""

import time

from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.grouping import ALPHA, check_averaging, weights


class PartialReduce(PacedRule):
    survives = True

    def __init__(self, worker: Worker, *, averaging: str = "constant", alpha: float = ALPHA, every: int = 1) -> None:
        check_averaging(averaging, alpha)
        super().__init__(worker, every=every)
        self._kind, self._alpha = averaging, alpha
        self._flat = FlatTensors(worker.parameters.values())
        self._buffer = self._flat.empty()

    def enter(self) -> None:
        self.worker.client.join()

    def after_update(self) -> None:
        if not self._pace.updated():
            return
        start_s = time.perf_counter()
        group = self.worker.client.group(self._pace.every)
        waited_s = time.perf_counter() - start_s
        if len(group.members) > 1:
            self._flat.read(self._buffer)
            shares = weights(group.iterations, averaging=self._kind, alpha=self._alpha)
            self.worker.averaging.average(self._buffer, group.members, shares, 2 * group.number)
            self._flat.write(self._buffer)
        staleness = max(group.iterations) - min(group.iterations)
        self.facts = StepFacts(group.members, waited_s, staleness)

    def leave(self) -> None:
        self.worker.client.leave()
