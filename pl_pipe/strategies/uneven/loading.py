"""Loaders and lengths for workers that do different numbers of batches. Lightning's loops -> *this* -> samplers.

Lightning is told that training loaders have no length, since a fast worker does more batches than its share. Schedulers
that ask how long training lasts are told the share.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, IterableDataset

from pl_pipe.comm.coordination.tickets import StoreTickets, TogetherTickets
from pl_pipe.errors import ConfigError
from pl_pipe.runtime.uneven_samplers import SharedSampler, TicketedSampler, epoch_order, is_of_one_order
from pl_pipe.strategies.uneven.support import batches_of


class Sharing(Protocol):
    """A strategy, as far as loading asks it."""

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def living(self) -> list[int]:
        """Workers that came to the last reunion."""

    @property
    def place(self) -> int:
        """Of this rank's worker among those."""

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class UnevenLoading:
    """For the time of a fit; workers in lockstep load as Lightning has it."""

    def __init__(
        self,
        strategy: Sharing,
        trainer: L.Trainer,
        stack: ExitStack,
        *,
        workers: int,
        lockstep: bool,
        tickets: StoreTickets | TogetherTickets,
    ) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._sampler: TicketedSampler | None = None
        self._tickets, self._workers, self._lockstep = tickets, workers, lockstep
        self._told_length = self._is_counting = False
        connector: Any = trainer._accelerator_connector
        self._takes_part = connector.use_distributed_sampler and not lockstep
        if not self._takes_part:
            return
        stack.callback(setattr, connector, "use_distributed_sampler", True)
        connector.use_distributed_sampler = False
        fit_loop: Any = trainer.fit_loop
        self._plain_setup: Callable[[], Any] = fit_loop.setup_data
        vars(fit_loop)["setup_data"] = self._setup_data
        stack.callback(vars(fit_loop).pop, "setup_data", None)

    @property
    def deals(self) -> bool:
        """Batches go to whoever is free, so that loaders have all samples before they come here."""
        return bool(self._takes_part)

    def process(self, loader: Any) -> Any:
        if not self._takes_part or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader  # what has no samplers is each worker's own
        if self._trainer.training:
            return _update_dataloader(loader, self._ticketed(loader))
        sampler: Any = loader.sampler
        if is_of_one_order(sampler):
            return _update_dataloader(loader, SharedSampler(sampler, shares=self._place))
        raise ConfigError(
            f"a validation loader has a {type(loader.sampler).__name__}, so that workers would not know who evaluates "
            f"what; leave shuffle and sampler out"
        )

    def counted(self, loader: Any) -> Any:
        """For its length alone: whoever trains has the loader processed anew, when lengths are known."""
        self._is_counting = True
        return self.process(loader)

    def _ticketed(self, loader: Any) -> TicketedSampler:
        if self._sampler is not None and self._sampler.rounds == 0:
            raise ConfigError(
                "there are several training loaders, of which workers that do different numbers of batches cannot take "
                "turns; combine them into one DataLoader, or choose strategy=ddp"
            )
        samples, batch_size, drop_last = batches_of(loader)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        rounds = 0 if self._sampler is None else self._sampler.rounds
        trainer: Any = self._trainer
        self._sampler = TicketedSampler(
            epoch_order(loader.sampler, samples, seed=seed, first_workers=self._first_workers),
            samples=samples,
            batch_size=batch_size,
            drop_last=drop_last,
            limit=self._limit,
            place=self._strategy.place,
            workers=len(self._strategy.living),
            tickets=self._tickets,
            epoch=lambda: int(trainer.fit_loop.epoch_progress.current.processed),
        )
        self._sampler.rounds = rounds
        return self._sampler

    def _first_workers(self, draw: Callable[[], Any]) -> Any:
        return self._strategy.broadcast(draw() if self._strategy.is_global_zero else None)

    def _place(self) -> tuple[int, int]:
        return self._strategy.place, len(self._strategy.living)

    def _setup_data(self) -> None:
        """Lightning's limit would hold for each worker; the sampler's holds for all together."""
        trainer: Any = self._trainer
        self._limit = trainer.limit_train_batches
        if self._limit:
            trainer.limit_train_batches = 1.0
        try:
            self._plain_setup()
        finally:
            trainer.limit_train_batches = self._limit
        if self._sampler is not None and self._told_length:
            trainer.fit_loop.max_batches = self._sampler.share

    def begin_epoch(self, data_fetcher: Any, *, resumes: bool) -> None:
        """Loads the epoch that a checkpoint says, where schedules had asked for lengths, and so for batches, before."""
        if resumes and self._sampler is not None and not self._sampler.is_of_this_epoch:
            iter(data_fetcher)

    @contextmanager
    def lengths_known(self) -> Iterator[None]:
        """Within the block, in which optimizers and schedulers are made, training has a length."""
        self._told_length = True
        fit_loop: Any = self._trainer.fit_loop
        if self._sampler is not None:
            fit_loop.max_batches = self._sampler.share
        try:
            yield
        finally:
            self._told_length = False
            if self._sampler is not None and self._sampler.share:
                fit_loop.max_batches = float("inf")
            if self._is_counting:
                self._is_counting, self._sampler = False, None

    def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    # ---- what all follow rank 0 in

    def state(self) -> dict[str, Any] | None:
        if not self._strategy.is_global_zero:
            return None
        loop: Any = self._trainer.fit_loop.epoch_loop
        return {
            "schedulers": [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs],
            "rates": [
                [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
                for one in self._trainer.optimizers
            ],
            "steps": loop.automatic_optimization.optim_progress.state_dict(),
            "stepped": loop._batches_that_stepped,
        }

    def follow(self, state: dict[str, Any]) -> None:
        """As if this worker went on from rank 0's checkpoint; and evaluations are shared by those who live."""
        if not self._strategy.is_global_zero and not self._lockstep:
            loop: Any = self._trainer.fit_loop.epoch_loop
            for config, known in zip(self._trainer.lr_scheduler_configs, state["schedulers"], strict=True):
                config.scheduler.load_state_dict(known)
            for optimizer, groups in zip(self._trainer.optimizers, state["rates"], strict=True):
                for group, known in zip(optimizer.param_groups, groups, strict=True):
                    group.update(known)
            loop.automatic_optimization.optim_progress.load_state_dict(state["steps"])
            loop._batches_that_stepped = state["stepped"]
        self._share_evaluation()
        if self._sampler is not None and self._sampler.rounds > 1:
            self._forget(self._sampler.rounds - 2)

    def _forget(self, epoch: int) -> None:
        if self._strategy.is_global_zero:
            assert isinstance(self._tickets, StoreTickets)
            self._tickets.forget(epoch)

    def _share_evaluation(self) -> None:
        if self._sampler is not None:
            self._sampler.workers_are(*self._place())
        loop: Any = self._trainer.fit_loop.epoch_loop.val_loop
        combined = loop._combined_loader
        if not self._takes_part or combined is None or len(self._strategy.living) == self._workers:
            return
        limit = self._trainer.limit_val_batches
        loop._max_batches = [
            _parse_num_batches(RunningStage.VALIDATING, len(loader), limit) if _is_shared(loader) else batches
            for loader, batches in zip(combined.flattened, loop._max_batches, strict=True)
        ]


def _is_shared(loader: Any) -> bool:
    return isinstance(getattr(loader, "sampler", None), SharedSampler)
