"""Who trains on which batch, when workers are pipelines. Lightning's loops -> *PipelinesLoading* -> samplers.

A pipeline takes a batch's number for all its ranks: the first of them to ask takes it, and tells the others. Every
pipeline evaluates all data: the numbers are then a single process's, and need not be put together.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from pl_pipe.comm.coordination.tickets import StoreTickets, TogetherTickets
from pl_pipe.errors import ConfigError
from pl_pipe.runtime.uneven_samplers import RoundSampler, epoch_order
from pl_pipe.strategies.uneven.loading import UnevenLoading
from pl_pipe.strategies.uneven.support import batches_of

if TYPE_CHECKING:
    from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy


class PipelinesLoading(UnevenLoading):
    """For the time of a fit."""

    def __init__(self, strategy: "SDPipeStrategy", trainer: L.Trainer, stack: ExitStack, *, lockstep: bool) -> None:
        worlds, name = strategy.worlds, strategy.run_name
        tickets = TogetherTickets(StoreTickets(name, worlds.store), f"{name}/pipeline{worlds.pipeline}", worlds.store)
        connector: Any = trainer._accelerator_connector
        self._shares = bool(connector.use_distributed_sampler)
        self._reports = strategy.reports
        self._told = tickets
        self._rounds: RoundSampler | None = None
        super().__init__(
            strategy, trainer, stack, workers=worlds.placement.pipelines, lockstep=lockstep, tickets=tickets
        )

    @override
    def process(self, loader: Any) -> Any:
        if not self._trainer.training or not self._shares:
            return loader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            kind = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
            raise ConfigError(
                f"the training data ({kind}) have no numbered samples, so pipelines cannot share them, and would all "
                f"train on the same; give a DataLoader over a Dataset with a length, or set "
                f"trainer.use_distributed_sampler=false and let each pipeline's data be its own"
            )
        sampler = self._in_rounds(loader) if self._lockstep else self._ticketed(loader)
        return _update_dataloader(loader, sampler)

    def _in_rounds(self, loader: Any) -> RoundSampler:
        samples, batch_size, drop_last = batches_of(loader)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        trainer: Any = self._trainer
        self._rounds = RoundSampler(
            epoch_order(loader.sampler, samples, seed=seed, first_workers=self._first_workers),
            samples=samples,
            batch_size=batch_size,
            drop_last=drop_last,
            place=self._strategy.place,
            workers=len(self._strategy.living),
            epoch=lambda: int(trainer.fit_loop.epoch_progress.current.processed),
        )
        return self._rounds

    @override
    def begin_epoch(self, data_fetcher: Any, *, resumes: bool) -> None:
        super().begin_epoch(data_fetcher, resumes=resumes)
        if self._rounds is not None:
            self._rounds.draw()

    @override
    def _forget(self, epoch: int) -> None:
        if self._reports:
            self._told.forget(epoch, of_all=self._strategy.is_global_zero)

    @override
    def _share_evaluation(self) -> None:
        if self._sampler is not None:
            self._sampler.workers_are(*self._place())
