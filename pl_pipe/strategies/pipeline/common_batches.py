"""One rank's batches on all ranks, where each has loaded its own. a loop's batch -> *CommonBatches* -> hooks, steps.

A script that makes its data without a seed makes other data in each process, and the stages of a pipeline work on one
batch. With the first batch of every loader the ranks compare; where they differ, one rank sends all of its batches,
before any hook sees them. Under asynchronous schedules that is one of the first stage, which is ahead of the others.
"""

import pickle
from typing import Any

import lightning as L
from torch import Tensor

from pl_pipe.comm.objects import ObjectChannel
from pl_pipe.errors import StageError
from pl_pipe.log import get_logger
from pl_pipe.runtime.random_stream import RandomStream
from pl_pipe.strategies.pipeline.ranks import differing_rank
from pl_pipe.tensors.trees import map_tensors

log = get_logger(__name__)


class CommonBatches:
    """One rank's end; all ranks must ask for the same batches."""

    def __init__(self, trainer: L.Trainer, loading: RandomStream, *, source: int, timeout_s: float) -> None:
        """
        Args:
            loading: what hooks draw from after a batch is loaded; it goes along with the batch.
            source: whose batches all get, where they differ.
        """
        self._trainer, self._loading, self._source, self._timeout_s = trainer, loading, source, timeout_s
        self._differ: dict[tuple[Any, int], bool] = {}
        """Of each loader by the trainer's stage and its place, whether the ranks' first batches do."""
        self._channel: ObjectChannel | None = None

    def compare_anew(self) -> None:
        """The loaders of the trainer's stage begin again."""
        stage = self._trainer.state.stage
        self._differ = {loader: differ for loader, differ in self._differ.items() if loader[0] is not stage}

    def of(self, batch: Any, dataloader_idx: int) -> Any:
        """This rank's batch, or the one that all have in its place."""
        loader = (self._trainer.state.stage, dataloader_idx)
        if loader not in self._differ:
            self._differ[loader] = differing_rank(batch) is not None
            if self._differ[loader] and self._channel is None:
                self._channel = ObjectChannel(timeout_s=self._timeout_s, called="a batch that rank {} sends")
                self._warn()
        if not self._differ[loader]:
            return batch
        assert self._channel is not None
        if self._trainer.global_rank != self._source:
            content, stream = self._channel.receive(self._source)
            vars(self._loading).update(vars(stream))
            return content
        try:
            message = pickle.dumps((map_tensors(batch, Tensor.cpu), self._loading))
        except Exception as error:
            raise StageError(
                f"the ranks have loaded different batches, and rank {self._source}'s, a {type(batch).__name__}, cannot "
                f"be sent to the others ({error}); call lightning.seed_everything before the data are made"
            ) from error
        for rank in range(self._trainer.world_size):
            if rank != self._source:
                self._channel.send_bytes(message, rank)
        return batch

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _warn(self) -> None:
        if self._trainer.is_global_zero:
            log.warning(
                "the ranks have loaded different data, so that all take rank %d's, which sends them every batch; for "
                "each to load its own, call lightning.seed_everything before the data are made",
                self._source,
            )
