"""One rank's part among those that train the same weights. strategy -> *Membership* -> coordinator, synchronizer.

Those are all workers of `DataParallelStrategy`, and the replicas of a stage in `SDPipeStrategy`. In a run a membership
goes through

    begin ─ join ─ make_rule ─ (enter ─ updated … updated ─ unite) for every epoch ─ end_rule ─ leave ─ close
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from pl_pipe.comm import CommunicationError
from pl_pipe.comm.coordination import Coordinator, CoordinatorClient, StoreMailbox
from pl_pipe.comm.interruption import interrupt_groups, is_about_peers
from pl_pipe.comm.lifelines import Fault
from pl_pipe.comm.peers import Peers
from pl_pipe.comm.synchronizers import Exchange, Reunion, Synchronizer, Worker, difference, digest
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.strategies.peer_faults import PeerError, PeerFaults
from pl_pipe.strategies.uneven.assembly import Assembly
from pl_pipe.strategies.uneven.report import UnevenReport
from pl_pipe.strategies.uneven.settings import UnevenSettings

log = get_logger(__name__)


@dataclass
class ModelTensors:
    """What the members have to have alike at the end of an epoch."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class Loading(Protocol):
    """Who gets which batch."""

    def state(self) -> Any: ...

    def follow(self, state: Any) -> None:
        """Goes on as the first rank does."""


class Membership:
    """Rank 0 decides for all (`coordinator`), and all ranks of the run meet (`assembly`); `replicas` have the same
    weights, and average them."""

    def __init__(self, settings: UnevenSettings) -> None:
        self.settings = settings
        self.report = UnevenReport()
        self.gone: set[int] = set()
        """Ranks that have ended, and that the others do without."""
        self.living: list[int] = []
        """Ranks that came to the last reunion."""
        self.coordinator: Coordinator | None = None
        self.rule: Synchronizer | None = None
        self.assembly: Assembly | None = None
        self._entered = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, of a trainer as well, takes part in no run."""
        kept = {"report": self.report, "gone": self.gone, "living": self.living}
        return {**vars(Membership(self.settings)), **kept}

    # ---- from the beginning of a run to its end

    def refuse_gaps(self) -> None:
        """Before a trainer's next call: those who lived have a process group with the dead in it."""
        if self.gone:
            ranks = ", ".join(map(str, sorted(self.gone)))
            raise ConfigError(
                f"rank(s) {ranks} ended in an earlier call of this trainer, and the processes that are left cannot "
                f"begin another; evaluate or go on from the last checkpoint in a new run"
            )

    def expect(self, ranks: Iterable[int]) -> None:
        """These begin a run."""
        self.gone, self.living = set(), list(ranks)

    def begin(
        self, rank: int, name: str, sets: Mapping[str, tuple[int, ...]], faults: PeerFaults, *, store: Any = None
    ) -> None:
        """
        Args:
            name: of the run, the same on all ranks and never used twice.
            sets: of ranks that may meet, or average, with one another; `all` is one of them.
            faults: told of ranks for which others wait in vain.
            store: through which they meet; by default that of the default process group.
        """
        self.rank, self._name, self._store = rank, name, store
        if rank == 0:
            self.coordinator = Coordinator(
                self._mailbox(),
                dict(sets),
                rules=self.settings.rules,
                distance=self.settings.distance,
                patience_s=float(self.settings.timeout_s),
                on_held=faults.suspect,
            )
            self.coordinator.start()
            faults.on_interrupt = self.coordinator.fail
        self._everyone = self._client("all")
        self.assembly = assembly = Assembly(self._everyone)
        faults.progress = lambda: assembly.batches

    def _mailbox(self) -> StoreMailbox:
        return StoreMailbox(self._name, self._store)

    def _client(self, among: str) -> CoordinatorClient:
        return CoordinatorClient(self._mailbox(), self.rank, among=among, timeout_s=self.settings.timeout_s)

    def join(
        self,
        replicas: Sequence[int],
        tensors: ModelTensors,
        *,
        among: str = "all",
        called: str = "workers",
        new_peers: Callable[[], Peers] | None = None,
    ) -> None:
        """All replicas have the first one's numbers, if they have the same model at all.

        Args:
            among: the set of `begin` that the replicas are.
            new_peers: makes a group of the replicas, at the same point on each; by default of all ranks.
        """
        self.replicas, self._new_peers = tuple(replicas), new_peers
        self.client = self._everyone if among == "all" else self._client(among)
        different = difference(self.client.meet(digest(tensors.parameters, tensors.buffers), "compare models"))
        if different is not None:
            raise ConfigError(
                f"the {called} have different models: {different}; build the same on all ranks, and let nothing in it "
                f"depend on the rank"
            )
        peers = None if new_peers is None else new_peers()
        self.exchange = Exchange(peers, timeout_s=self.settings.timeout_s, is_gone=self.gone.__contains__)
        self.reunion = Reunion(self.client, self.exchange)
        self.reunion.copy([*tensors.parameters.values(), *tensors.buffers.values()], of=self.replicas[0])

    def make_rule(self, parameters: Mapping[str, Tensor], make: Callable[[Worker], Synchronizer]) -> None:
        self.rule = make(
            Worker(
                self.rank,
                self.replicas,
                parameters,
                self.client,
                self.exchange,
                timeout_s=self.settings.timeout_s,
                new_peers=self._new_peers,
                is_gone=self.gone.__contains__,
            )
        )
        self._entered = False

    def end_rule(self, *, failed: bool) -> None:
        """From here on nobody does without a rank that ends."""
        rule, self.rule = self.rule, None
        if rule is not None and not failed:
            rule.close()

    def leave(self, *, failed: bool) -> None:
        """Waits for all that live, where nothing has failed: nobody asks the coordinator for anything after this."""
        if self.assembly is not None and not failed:
            self.assembly.meet(None, "end the run")
        self.assembly = None

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None

    # ---- faults

    def lose(self, fault: Fault, ranks: Sequence[int], *, then: str) -> None:
        """By the lifelines' thread: the others do without these ranks; `then` says what comes of it."""
        if fault.rank in self.gone:
            return
        self.gone.update(ranks)
        if self.coordinator is not None:
            for rank in ranks:
                self.coordinator.lost(rank)
            what = f"failed: {fault.text}" if fault.text else "is gone: its process ended without a word"
            log.warning("rank %d %s; %s", fault.rank, what, then)

    def fail(self, error: BaseException, faults: PeerFaults) -> None:
        """This rank's run ends with the error: those who wait for it, or average with it, must not go on doing so."""
        if isinstance(error, PeerError):
            faults.tell_own(error)  # others may go on without the rank that it names, and must without this one
        if self.coordinator is not None:
            self.coordinator.fail(f"rank 0 failed: {type(error).__name__}: {error}")
        interrupt_groups()

    # ---- training

    def enter(self) -> bool:
        """Before a batch. Returns whether it is the epoch's first."""
        assert self.rule is not None
        if self._entered:
            return False
        self.rule.enter()
        self.report.begin_epoch()
        self._entered = True
        return True

    def updated(self) -> None:
        """After the optimizer's step."""
        assert self.rule is not None
        self.rule.after_update()
        self.report.note(self.rule.facts)
        self.rule.facts = None

    def may_save(self, path: Any) -> bool:
        """Not within an epoch, where everyone has weights of its own."""
        if self.assembly is None or not self.assembly.inside_batch:
            return True
        log.warning(
            "%s is not saved: within an epoch everyone has weights of its own; save in on_train_epoch_end, when they "
            "have been averaged", path,
        )  # fmt: skip
        return False

    def unite(
        self, content: Mapping[str, Any], tensors: ModelTensors, optimizers: Sequence[Optimizer], loading: Loading
    ) -> dict[int, Any]:
        """Nobody has more batches in this epoch: everything is averaged. Returns what each rank brought."""
        assert self.rule is not None
        assert self.assembly is not None
        if self._entered:
            self.report.end_epoch()
            self._entered = False
        self.rule.leave()  # also by one that had no batch: since the last reunion others may wait for it
        found = self.assembly.meet({**content, "report": self.report.epoch()}, "end an epoch")
        self.living = sorted(found)
        self.rule.settle()
        if self.settings.synchronizer == "allreduce":
            self.reunion.model({}, tensors.buffers)  # parameters and the optimizer's state are the same
        else:
            self.reunion.model(tensors.parameters, tensors.buffers)
            for optimizer in optimizers:
                self.reunion.optimizer(optimizer)
        loading.follow(self.assembly.broadcast(loading.state()))
        self.rule.resume()
        if self.rank == self.replicas[0]:
            self.client.reunited()
        self.assembly.meet(None, "go on after an epoch")
        self.report.gathered({rank: told["report"] for rank, told in found.items()})
        return found


def said_by_coordinator(error: BaseException) -> BaseException:
    """An error of an exchange that is about no peer is what the coordinator was told."""
    if isinstance(error, CommunicationError) and not is_about_peers(error):
        return PeerError(str(error))
    return error
