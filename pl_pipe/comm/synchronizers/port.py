"""What happens to the parameters or gradients of workers that train the same model. strategy -> *Synchronizer*.

A worker is a device of plain data parallelism, or one replica of a pipeline stage.

    enter ─► begin_step ─► forward ─► begin_backward ─► backward ─► before_update ─► optimizer ─► after_update ─► …
                ▲                                                                                      │
                └──────────────────────────────────────────────────────────────────────────────────────┘
          ─► leave ─► settle (all have left) ─► everything is averaged: validation, checkpoint ─► resume ─► enter
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pl_pipe.comm.coordination import CoordinatorClient
from pl_pipe.comm.peers import Peers, WorldPeers
from pl_pipe.comm.synchronizers.exchange import Averaging


@dataclass(frozen=True)
class StepFacts:
    """What a step's synchronization was like."""

    members: tuple[int, ...]
    """Who averaged, this worker among them."""
    waited_s: float = 0.0
    staleness: int = 0
    """Steps by which the member that was furthest behind was late; waves ahead of the slowest, with `wave`."""


@dataclass
class Worker:
    """What a synchronizer works with: one worker's own, and its ways to the others."""

    rank: int
    workers: tuple[int, ...]
    """All that train this model, by rank."""
    parameters: Mapping[str, Tensor]
    client: CoordinatorClient
    averaging: Averaging
    timeout_s: float = 300.0
    new_peers: Callable[[], Peers] | None = None
    """Makes another group of all workers, at the same point on each; by default, of the default process group."""
    is_gone: Callable[[int], bool] = field(default=lambda _: False)

    def peers(self) -> Peers:
        return WorldPeers(timeout_s=self.timeout_s) if self.new_peers is None else self.new_peers()

    @property
    def living(self) -> list[int]:
        return [worker for worker in self.workers if not self.is_gone(worker)]


class Synchronizer(Protocol):
    """One worker's rule."""

    lockstep: bool
    """All workers must take equally many steps: each waits for the others' n-th at its own n-th."""
    survives: bool
    """The others can go on when a worker ends."""
    facts: StepFacts | None
    """Of the step that ended last, until they are taken; None where it averaged with nobody."""

    def enter(self) -> None:
        """Steps follow."""

    def begin_step(self) -> None:
        """Before the forward; parameters may change."""

    def begin_backward(self) -> None:
        """Gradients come now, and will be complete after this backward."""

    def before_update(self) -> None:
        """Gradients are here; they or the parameters may change."""

    def after_update(self) -> None:
        """The optimizer has changed the parameters."""

    def leave(self) -> None:
        """No more steps for now; nobody must have to wait for this worker's."""

    def settle(self) -> None:
        """All workers have left: the parameters become what is to be averaged over all."""

    def resume(self) -> None:
        """The parameters are the same on all workers now, whatever they were."""

    def close(self) -> None:
        """Ends threads and groups; all workers that live do so at the same point."""


class Rule:
    """A synchronizer that does nothing: what others leave as it is."""

    lockstep = False
    survives = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.facts: StepFacts | None = None

    def enter(self) -> None: ...

    def begin_step(self) -> None: ...

    def begin_backward(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def leave(self) -> None: ...

    def settle(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...
