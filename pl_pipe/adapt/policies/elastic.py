"""Throughput, or a schedule, changes the number of workers. Provisioning -> *ElasticPolicy* -> torchrun.

torchrun starts all workers anew when their number changes. So before it does, the state is saved with the place in the
epoch; the provisioner is asked; the workers wait to be ended; and those that are started go on from there. Where more
are wanted, the provisioner may prepare them while training goes on.

    prepare │ step k │ save │ ask ─► agents come or go ─► torchrun ends the workers and starts as many as agents │ k + 1
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import BatchSampler
from typing_extensions import override

from pl_pipe.adapt.claim import Claim
from pl_pipe.adapt.elastic_sampler import ElasticSampler, leaves_a_batch
from pl_pipe.adapt.policies.base import STOP, Policy
from pl_pipe.adapt.policies.elastic_start import begin_anew_with_the_rest, require_elastic, require_one_loader
from pl_pipe.adapt.policies.handover import Handover
from pl_pipe.adapt.policies.noise_batch import batch_samplers, count_anew
from pl_pipe.adapt.provisioner import AGAIN, provisioner_of
from pl_pipe.adapt.provisioning import Provisioning, parse_schedule, scheduled_workers
from pl_pipe.adapt.resizable_batches import ResizableBatches
from pl_pipe.adapt.step_pace import StepPace
from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)

FILE, CLAIM = "elastic.ckpt", "elastic.claim"
_AHEAD_S = 30.0
"""Before a schedule adds workers, they are prepared."""


@dataclass(frozen=True)
class Workers:
    """So many from now on."""

    number: int
    policy: Any

    def __repr__(self) -> str:
        return f"Workers({self.number})"

    def apply(self, _trainer: L.Trainer) -> None:
        self.policy.wanted = self.number


class ElasticPolicy(Policy):
    """Adds workers while that is worth it, or follows a schedule; under torchrun with `--nnodes LEAST:MOST`."""

    def __init__(
        self,
        *,
        folder: str | Path,
        least: int = 1,
        most: int = 4,
        interval: int = 100,
        window: int = 50,
        threshold: float = 0.33,
        schedule: str | Sequence[str] | None = None,
        command: str | None = None,
        wait_s: float = 120.0,
        on_error: str = STOP,
    ) -> None:
        """
        Args:
            folder: where the state is kept from one number of workers to the next; all hosts must see it.
            interval: steps between decisions.
            window: steps before a decision whose median time counts, as far as the interval holds so many.
            threshold: the share of a worker's due that one more must bring.
            schedule: `size:steps,…` instead of throughput.
            command: that starts and stops workers, with `{workers}` in it, and returns only when those that are too
                many have gone; a lab does so by itself.
            wait_s: how long workers wait to be ended before they start anew by themselves.
        """
        check_whole(interval=interval, window=window)
        check_numbers(wait_s=wait_s)
        super().__init__(interval=1 if schedule is not None else interval, on_error=on_error)
        if window < 1:
            raise ConfigError(f"window={window} is no number of steps; choose 1 or more")
        if wait_s <= 0:
            raise ConfigError(f"wait_s={wait_s} must be more than 0: it is how long workers wait to be ended")
        self.rule = Provisioning(least=least, most=most, threshold=threshold)
        self.schedule = None if schedule is None else parse_schedule(schedule)
        if self.schedule is not None:
            for size, _ in self.schedule:
                if not least <= size <= most:
                    raise ConfigError(
                        f"schedule={schedule} wants {size} workers, least={least} and most={most} are the limits; "
                        f"change one of them"
                    )
        self.path = Path(folder) / FILE
        self._claim = Claim(Path(folder) / CLAIM)
        self._word: str | None = None
        self._command, self._wait_s = command, wait_s
        self._handover: Handover | None = None
        self._consumed = 0
        self._stepped: int | None = None
        """Steps of those before: by this number loggers know the next one."""
        self.wanted: int | None = None
        """So many workers, before the next batch: by then all hooks of this one have run."""
        self._asked: int | None = None
        """So many workers were asked for by those that are to be ended."""
        self._missed: int | None = None
        """So many were asked for, and others came: they are not asked for again."""
        self._pace = StepPace(window=window, interval=interval if schedule is None else window)
        self._samplers: list[ElasticSampler] = []

    @staticmethod
    def checkpoint(folder: str | Path) -> Path | None:
        """For `trainer.fit(…, ckpt_path=ElasticPolicy.checkpoint(folder))`: what a run started anew goes on from."""
        path = Path(folder) / FILE
        return path if path.is_file() else None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        require_elastic(trainer, least=self.rule.least, most=self.rule.most)
        provisioner = provisioner_of(self._command)
        if trainer.is_global_zero:
            provisioner.check()
        self._handover = Handover(provisioner, wait_s=self._wait_s)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        require_one_loader(trainer)
        self._word = trainer.strategy.broadcast(self._claim.made() if trainer.is_global_zero else None)
        where: Any = {"rank": trainer.global_rank, "ranks": trainer.world_size}
        self._samplers = [ElasticSampler.within(batches, **where) for batches in batch_samplers(trainer)]
        for sampler in self._samplers:
            sampler.consumed = self._consumed
        if not leaves_a_batch(self._batches(trainer), self._samplers[0], self._consumed, ranks=trainer.world_size):
            raise ConfigError(
                f"the checkpoint is of the middle of an epoch, of whose samples {trainer.world_size} rank(s) would get "
                f"no whole batch any more (drop_last=True); go on with fewer, or from the checkpoint of an epoch's end"
            )
        count_anew(trainer)
        fetcher: Any = trainer.fit_loop._data_fetcher
        for sampler in self._samplers:
            sampler.set_epoch(trainer.current_epoch)
        iter(fetcher)
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # here it is
        if trainer.is_global_zero:
            log.info(
                "%d worker(s) from step %d on, %d samples into the epoch",
                *(trainer.world_size, trainer.global_step, self._consumed),
            )
        self._compare_with_request(trainer)

    def _compare_with_request(self, trainer: L.Trainer) -> None:
        """Workers that nobody could start are not asked for again and again: each time, training stands still."""
        asked, self._asked = self._asked, None
        if asked is None or asked == trainer.world_size:
            return
        self._missed = asked
        self.rule.settled = True
        if trainer.is_global_zero:
            advice = "What ends workers must return only when they have gone"
            log.warning(
                "%d worker(s) were asked for, and there are %d; training goes on with these. %s",
                *(asked, trainer.world_size, advice if asked < trainer.world_size else "Look at what starts them"),
            )

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._end_if_others_have_begun(trainer)
        if self._stepped is not None:  # the loop counts one more batch, as if there were one in its checkpoint
            trainer.fit_loop.epoch_loop._batches_that_stepped, self._stepped = self._stepped, None
        if self.wanted is None or not self._consumed or self._pace.is_within_step:
            return  # a change is made between two steps of an epoch
        if not leaves_a_batch(self._batches(trainer), self._samplers[0], self._consumed, ranks=self.wanted):
            return
        assert self._handover is not None
        if self._handover.is_prepared(trainer, self.wanted, waits=self.schedule is not None):
            self._asked = self.wanted
            self._handover.make(trainer, self.wanted, self.path)
        elif self._handover.is_late:
            self._go_on_without(trainer, self.wanted)

    def _go_on_without(self, trainer: L.Trainer, wanted: int) -> None:
        self._missed, self.wanted, self.rule.settled = wanted, None, True
        if trainer.is_global_zero:
            log.warning(
                "%d worker(s) were asked for, and are not prepared after %g s; training goes on with %d. Look at what "
                "starts them",
                *(wanted, self._wait_s, trainer.world_size),
            )

    @staticmethod
    def _batches(trainer: L.Trainer) -> BatchSampler:
        return batch_samplers(trainer)[0]

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples = self._samples_of(batch, trainer)
        self._pace.add(samples)
        self._consumed += samples * trainer.world_size
        if not trainer.fit_loop._should_accumulate():
            self._pace.end_step()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _samples_of(self, batch: Any, trainer: L.Trainer) -> int:
        """By the order, which knows better than the shapes of tensors; but where sizes change, batches of the old one
        may have been drawn ahead."""
        batches = self._batches(trainer)
        if isinstance(batches, ResizableBatches):
            return extract_batch_size(batch)
        rest = -(-max(0, self._samplers[0].samples - self._consumed) // trainer.world_size)
        return min(batches.batch_size, rest)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._consumed = 0
        self._pace.pause()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            self.path.unlink(missing_ok=True)  # the next run in this folder is another one
            self._claim.end()
        self._word = None

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end_if_others_have_begun(trainer)  # as this one's peers may have done

    def _end_if_others_have_begun(self, trainer: L.Trainer) -> None:
        if self._claim.is_lost(self._word):
            log.warning("rank %d: other workers have begun with this run; it ends, and joins them", trainer.global_rank)
            os._exit(AGAIN)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Of every epoch but one that was begun by other workers."""
        for sampler in self._samplers:
            sampler.consumed = 0
        count_anew(trainer)

    @override
    def decide(self, trainer: L.Trainer) -> Workers | None:
        if self.wanted is not None:
            return None
        present = trainer.world_size
        if self.schedule is not None:
            wanted = scheduled_workers(self.schedule, trainer.global_step)
            self._look_ahead(trainer, self.schedule)
        elif self._pace.is_known:
            sample_s: Any = trainer.strategy.reduce(_tensor(self._pace.sample_s, trainer))
            samples_per_s, is_open = present / float(sample_s), not self.rule.settled
            wanted = self.rule.workers(present, samples_per_s)
            if trainer.is_global_zero and is_open:
                log.info(
                    "step %d: %.3g samples/s with %d worker(s); %d wanted",
                    *(trainer.global_step, samples_per_s, present, wanted),
                )
        else:
            return None
        return None if wanted in (present, self._missed) else Workers(wanted, self)

    def _look_ahead(self, trainer: L.Trainer, schedule: list[tuple[int, int]]) -> None:
        step_s = self._pace.step_s
        if step_s is not None and trainer.is_global_zero:
            assert self._handover is not None
            ahead = trainer.global_step + int(_AHEAD_S / step_s) + 1
            self._handover.prepare(trainer, scheduled_workers(schedule, ahead))

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The rest of the epoch is one of its own to the loop: other ranks have other numbers of batches left."""
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if own and own["consumed"] and not begin_anew_with_the_rest(checkpoint):
            own["consumed"] = 0
        elif own and own["consumed"]:
            self._stepped = checkpoint["global_step"]

    @override
    def state_dict(self) -> dict[str, Any]:
        """A decision that has not been carried out is made anew by who goes on from here."""
        rule = self.rule.state()
        if self.wanted is not None and self._asked is None:
            rule["settled"] = False
        return {"consumed": self._consumed, "rule": rule, "asked": self._asked}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._consumed, self._asked = state_dict["consumed"], state_dict.get("asked")
        self.rule.load(state_dict["rule"])


def _tensor(value: float, trainer: L.Trainer) -> Any:
    return torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
