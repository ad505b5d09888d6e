"""`ad_psgd`: asynchronous pairwise averaging (AD-PSGD, ICML'18). Nobody waits for another's compute.

The worker's parameters x lie beside the model. A step takes a copy, computes an update on it, and adds that to x. While
it computes, one thread averages x with a partner's, and others answer workers that chose this one:

    main      copy x ─ forward ─ backward ─ optimizer ─ x += update ─ …
    active       └─ average with partner j ─┘
    service    ·  ·  answers k  ·  ·  answers m  ·

Nor does a step wait for an averaging that takes longer than it: the next one begins with the first step after that (of
those that are to begin one, when not `every` step is).
What others than the optimizer do to the model between steps, such as a callback that clips weights, is an update too.

An averaging adds half the difference of two copies to one side and takes it from the other, so updates that come in
between are kept and nothing is lost or doubled. Averagings of one worker follow each other: each has both workers'
`turn` locks, taken in the order of the workers' numbers. So the roles need no bipartite graph and no even number of
workers, and cannot deadlock: whoever waits for a lock holds only locks of lower numbers.

    i < j    take turn i; ask j, which takes turn j, answers x_j and lets go
    i > j    ask j, which takes turn j and answers x_j; take turn i; tell j x_i, upon which it lets go
"""

import threading
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.synchronizers.news import will_be_known
from pl_pipe.comm.synchronizers.pace import PacedRule
from pl_pipe.comm.synchronizers.port import StepFacts, Worker
from pl_pipe.comm.synchronizers.service import TensorService
from pl_pipe.comm.transport import CommunicationError

_EXCHANGE, _HOLD, _APPLY = 1, 2, 3


class Event(NamedTuple):
    """Something that happened to x, for those who replay it."""

    kind: str
    """`load`: a step took x. `update`: x got the step's update. `change`: x got what others did to the model since.
    `look`: x was copied to be averaged. `average`: x got half the difference to the partner's copy."""
    partner: int = -1
    number: int = -1
    """With `look` and `average`: of the averaging, among those that its active side began with its passive side."""
    active: bool = False


class ADPSGD(PacedRule):
    survives = True

    def __init__(self, worker: Worker, *, seed: int = 0, every: int = 1, history: list[Event] | None = None) -> None:
        """
        Args:
            every: in each step of so many the worker begins an averaging; others may begin one with it in any.
            history: gets an event for everything that happens to the parameters.
        """
        super().__init__(worker, every=every)
        self._draw = Random(f"{seed}/{worker.rank}")
        self._history = history
        self._flat = FlatTensors(worker.parameters.values())
        self._x = self._flat.read()
        self._known = self._x.clone()
        """The model, as x last knew it."""
        self._lock = threading.Lock()
        """Of x; held for as long as a copy takes."""
        self._turn = threading.Lock()
        """Of an averaging of this worker; held while messages travel."""
        self._held_for: int | None = None
        self._held: Tensor | None = None
        self._numbers: Counter[tuple[int, int]] = Counter()
        """Of averagings, by active and passive side."""
        self._active: threading.Thread | None = None
        self._error: Exception | None = None
        self._outcome: StepFacts | None = None
        self._service = TensorService(self, worker.peers(), dtype=self._flat.dtype, timeout_s=worker.timeout_s)

    # ---- the main thread

    def begin_step(self) -> None:
        self._take_in("change")
        with self._lock:
            self._known.copy_(self._x)
            self._note(Event("load"))
        self._flat.write(self._known)
        self._flat.read(self._known)  # narrower parameters round it
        others = [other for other in self.worker.living if other != self.worker.rank]
        if others and self._pace.is_last and self._is_free():
            partner = self._draw.choice(others)
            self._active = threading.Thread(target=self._average_with, args=(partner,), daemon=True, name="ad-psgd")
            self._active.start()

    def after_update(self) -> None:
        start_s = time.perf_counter()
        self._pace.updated()
        self._take_in("update")
        if self._is_free() and self._outcome is not None:
            self.facts = replace(self._outcome, waited_s=time.perf_counter() - start_s)
            self._outcome = None

    def leave(self) -> None:
        self._take_in("change")
        self._join()

    def settle(self) -> None:
        """Others may have averaged with this worker since its last step."""
        with self._lock:
            self._flat.write(self._x)

    def resume(self) -> None:
        super().resume()
        with self._lock:
            self._flat.read(self._x)
            self._known.copy_(self._x)

    def close(self) -> None:
        self._join()
        self._service.close()

    def _take_in(self, kind: str) -> None:
        """What has been done to the model is done to x, which would overwrite it otherwise."""
        model = self._flat.read()
        change = model.sub(self._known)
        if kind == "update" or change.any():
            self._known = model
            with self._lock:
                self._x.add_(change)
                self._note(Event(kind))

    def _is_free(self) -> bool:
        """Whether this worker's last averaging is over; how it failed, if it did, is raised here."""
        if self._active is not None and self._active.is_alive():
            return False
        self._join()
        return True

    def _join(self) -> None:
        if self._active is not None:
            self._active.join()
            self._active = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # ---- the active side, a thread of its own

    def _average_with(self, partner: int) -> None:
        mine = self.worker.rank
        number = self._numbers[mine, partner]
        self._numbers[mine, partner] += 1
        try:
            if mine < partner:
                with self._turn:
                    own = self._looked(partner, number, active=True)
                    theirs = self._service.call(partner, _EXCHANGE, own)
                    self._averaged(own, theirs, partner, number, active=True)
            else:
                theirs = self._service.call(partner, _HOLD)
                with self._turn:
                    own = self._looked(partner, number, active=True)
                    self._averaged(own, theirs, partner, number, active=True)
                self._service.call(partner, _APPLY, own)
            self._outcome = StepFacts(tuple(sorted((mine, partner))))
        except Exception as error:
            if not (isinstance(error, CommunicationError) and will_be_known(self.worker.is_gone, partner)):
                self._error = error

    # ---- the passive side, by threads of the service

    def handle(self, source: int, operation: int, numbers: Tensor) -> Tensor:
        sides = (source, self.worker.rank)
        number = self._numbers[sides]
        if operation == _EXCHANGE:
            with self._turn:
                own = self._looked(source, number, active=False)
                self._averaged(own, numbers, source, number, active=False)
            self._numbers[sides] += 1
            return own
        if operation == _HOLD:
            self._turn.acquire()
            self._held_for = source
            self._held = self._looked(source, number, active=False)
            return self._held
        assert operation == _APPLY
        assert self._held_for == source
        assert self._held is not None
        self._averaged(self._held, numbers, source, number, active=False)
        self._numbers[sides] += 1
        self._let_go()
        return torch.empty(0, dtype=self._flat.dtype)

    def gone(self, source: int) -> None:
        if self._held_for == source:
            self._let_go()

    def _let_go(self) -> None:
        self._held_for = self._held = None
        self._turn.release()

    # ---- x

    def _looked(self, partner: int, number: int, *, active: bool) -> Tensor:
        with self._lock:
            self._note(Event("look", partner, number, active))
            return self._x.clone()

    def _averaged(self, own: Tensor, theirs: Tensor, partner: int, number: int, *, active: bool) -> None:
        change = theirs.sub(own).mul_(0.5)
        with self._lock:
            self._x.add_(change)
            self._note(Event("average", partner, number, active))

    def _note(self, event: Event) -> None:
        if self._history is not None:
            self._history.append(event)
