"""`ad_psgd` with `matching`: in every step all workers are paired anew, by a draw that all make alike (SD-Pipe's)."""

import time

from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.grouping import matchings


class Matched(PacedRule):
    """Meeting n of a worker is meeting n of its partner, so that it is not asynchronous; published as AD-PSGD it is."""

    lockstep = True

    def __init__(self, worker: Worker, *, seed: int = 0, every: int = 1) -> None:
        super().__init__(worker, every=every)
        self._partners = matchings(worker.workers, seed=seed)
        self._flat = FlatTensors(worker.parameters.values())
        self._buffer = self._flat.empty()
        self._met = 0

    def after_update(self) -> None:
        if not self._pace.updated():
            return
        mine = self.worker.rank
        members = tuple(sorted((mine, next(self._partners)[mine])))
        start_s = time.perf_counter()
        self._flat.read(self._buffer)
        self.worker.averaging.average(self._buffer, members, (0.5, 0.5), 2 * self._met)
        self._flat.write(self._buffer)
        self._met += 1
        self.facts = StepFacts(members, time.perf_counter() - start_s)
