"""What policies have in common: they decide, all ranks compare, and only then anything changes. Policy -> *Change*.

Ranks that want no change do not wait for the others' decisions: they hear them after the next step. One that wants a
change waits for them now, and makes it only if all want the same. So whatever is wrong is known to all ranks at the
same point, at once or one step later.

class Ring(Policy):                                   a policy of one's own
    def decide(self, trainer):
        if trainer.global_step == 100:
            return SwitchTopology("ring")
"""

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import lightning as L
import torch.distributed as dist
from typing_extensions import override

from pl_pipe.adapt.monitors.base import patience_of, require_equal_steps
from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.comm.consensus import VotesToCome, ask_all, consensus
from pl_pipe.errors import ConfigError, PlPipeError
from pl_pipe.log import get_logger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = get_logger(__name__)

STOP, CONTINUE = "stop", "continue"
Rule = TypeVar("Rule", bound="DataclassInstance")


class PolicyError(PlPipeError):
    """A policy that raised, or whose ranks decided differently."""


def made_of(kind: type[Rule], settings: Mapping[str, Any], *, whose: str) -> Rule:
    """A rule with these settings; refuses names that it does not have, and says those that it has."""
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{whose} has no setting {name}={value!r}; its rule has {', '.join(known)}")
    return kind(**settings)


class Change(Protocol):
    """Something to do between two steps, by all ranks. Its `repr` must say all that it will do."""

    def apply(self, trainer: L.Trainer) -> None:
        """Raises before it has changed anything, if it raises at all."""


@dataclasses.dataclass(frozen=True)
class _Decision:
    """One rank's, of which the others have been told."""

    votes: VotesToCome
    told: str
    failure: Exception | None


class Policy(L.Callback):
    """Asks `decide` after every `interval` steps, or before each epoch but the first, and does what it returns."""

    def __init__(self, *, interval: int | None = 1, on_error: str = STOP, timeout_s: float | None = None) -> None:
        """
        Args:
            interval: steps; None is once an epoch, before it begins.
            on_error: what becomes of the training if the policy raises on any rank: `stop`, or `continue` without it.
            timeout_s: how long the ranks wait for each other's decision; None is as long as the strategy has them wait.
        """
        if interval is not None:
            check_whole(interval=interval)
        if interval is not None and interval < 1:
            raise ConfigError(f"{type(self).__name__}: interval={interval} is no number of steps; choose 1 or more")
        if on_error not in (STOP, CONTINUE):
            raise ConfigError(f"{type(self).__name__}: on_error={on_error} is unknown; choose {STOP} or {CONTINUE}")
        if timeout_s is not None:
            check_numbers(timeout_s=timeout_s)
            if timeout_s <= 0:
                raise ConfigError(f"{type(self).__name__}: timeout_s={timeout_s} must be more than 0")
        self.interval, self.on_error = interval, on_error
        self.failed = False
        """It raised, and training goes on without it."""
        self._timeout_s = timeout_s
        self._group: Any = None
        self._unheard: _Decision | None = None
        self._steps = 0

    def decide(self, trainer: L.Trainer) -> Change | None:
        """What to change now, alike on all ranks; None is nothing."""
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_equal_steps(self, trainer)
        self.failed, self._steps, self._unheard = False, trainer.global_step, None
        if trainer.world_size > 1:
            given = None if self._timeout_s is None else timedelta(seconds=self._timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=given or patience_of(trainer))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        before, self._steps = self._steps, trainer.global_step  # several optimizers take several steps a batch
        self._hear(trainer)
        if self.interval is not None and before // self.interval < self._steps // self.interval:
            self.consider(trainer)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.interval is None and trainer.current_epoch > 0:
            self.consider(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._hear(trainer)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def consider(self, trainer: L.Trainer) -> None:
        """Decides on every rank, compares, and applies what all agree on."""
        self._hear(trainer)  # where no step was made since the last decision
        if self.failed:
            return
        if self._group is None and trainer.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} has an on_train_start of its own, without which {trainer.world_size} ranks "
                f"cannot compare their decisions; call super().on_train_start(trainer, pl_module) in it"
            )
        change: Change | None = None
        failure: Exception | None = None
        try:
            change = self.decide(trainer)
            told = repr(change)
        except Exception as error:
            failure, told = error, f"{type(error).__name__}: {error}"
            if self._group is not None:  # the others hear of it after the next step, which may never end
                log.warning("policy %s failed on rank %d: %s", type(self).__name__, trainer.global_rank, told)
        if self._group is None:
            if failure is not None:
                self._give_up(trainer, f"policy {type(self).__name__} failed: {told}", failure)
            elif change is not None:
                self._make(trainer, change)
            return
        votes = ask_all((failure is not None, told), group=self._group)
        self._unheard = _Decision(votes, told, failure)
        if failure is None and change is not None and votes.wait().agreed:
            self._unheard = None
            self._make(trainer, change)

    def _hear(self, trainer: L.Trainer) -> None:
        """What the others had decided, of which nothing came."""
        if self._unheard is None:
            return
        decision, self._unheard = self._unheard, None
        if decision.votes.wait().agreed and decision.failure is None:
            return
        name, everyone = type(self).__name__, self._gathered(trainer, (decision.failure is not None, decision.told))
        bad = [(rank, words) for rank, (did_fail, words) in enumerate(everyone) if did_fail]
        if bad:
            problem = f"policy {name} failed on rank {bad[0][0]}: {bad[0][1]}"
        else:
            wishes = ", ".join(f"rank {rank} wants {words}" for rank, (_, words) in enumerate(everyone))
            problem = f"policy {name} decided differently: {wishes}"
        self._give_up(trainer, problem, decision.failure)

    def _make(self, trainer: L.Trainer, change: Change) -> None:
        problem, failure = self._made(trainer, change)
        if problem is not None:
            self._give_up(trainer, problem, failure)

    def _give_up(self, trainer: L.Trainer, problem: str, failure: Exception | None) -> None:
        if self.on_error == STOP:
            raise PolicyError(
                f"{problem}; mend it, or set on_error={CONTINUE} to train on without it. Nothing was changed"
            ) from failure
        self.failed = True
        if trainer.is_global_zero:
            log.warning("%s; training goes on without it, and nothing was changed", problem)

    def _made(self, trainer: L.Trainer, change: Change) -> tuple[str | None, Exception | None]:
        """What was wrong with the change on all ranks, if it was. One that some ranks have made ends the run."""
        failure: Exception | None = None
        try:
            change.apply(trainer)
        except Exception as error:
            failure = error
        told = "made" if failure is None else f"{type(failure).__name__}: {failure}"
        everyone = [(failure is not None, told)]
        if self._group is not None and not (consensus(told, group=self._group).agreed and failure is None):
            everyone = self._gathered(trainer, everyone[0])
        failed = [(rank, words) for rank, (did_fail, words) in enumerate(everyone) if did_fail]
        if not failed:
            return None, None
        problem = f"policy {type(self).__name__} wanted {change!r}, which failed on rank {failed[0][0]}: {failed[0][1]}"
        if len(failed) < len(everyone):
            raise PolicyError(
                f"{problem}; other ranks have changed, so that they differ now: mend it, and go on from the last "
                f"checkpoint"
            ) from failure
        return problem, failure

    def _gathered(self, trainer: L.Trainer, own: tuple[bool, str]) -> list[tuple[bool, str]]:
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, own, group=self._group)
        return everyone
