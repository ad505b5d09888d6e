"""Epochs that end together over several pipelines. Lightning's loops -> *PipelinesEpochs* -> the stages' reunions.

    pipeline 0   b b b b b b b │ drain ┐                              ┌ validation, checkpoints ─ next epoch
    pipeline 1   b b b b       │ drain ┘ all meet ─ stage by stage everything is averaged ┘

As `pl_pipe.strategies.uneven.epochs`, but for one thing: what ends a pipeline's epoch (no more batches, `max_steps`, a
stop, a signal) its ranks have agreed on among themselves, by the means of a pipeline, so that all of them come here
after the same batch. Pipelines in step (`allreduce`, `sma`, `matching`) hear of it at the epoch's end.
"""

from typing import Any

from typing_extensions import override

from pl_pipe.strategies.uneven.ending import EndingTogether


class PipelinesEpochs(EndingTogether):
    """It is made before the pipeline's own agreement on stops, which then comes first after a batch."""

    all_of = "all pipelines"
    alone = "in this pipeline alone"

    @property
    @override
    def _rank(self) -> int:
        return int(self._strategy.overall_rank)

    @override
    def _batch_ended(self, data_fetcher: Any) -> Any:
        """Pipelines in step end after the same batch: the epoch's last, whatever one of them has heard before."""
        if self._strategy.uneven.lockstep and not self._loop._is_training_done:
            return self._plain["batch_ended"](data_fetcher)
        return super()._batch_ended(data_fetcher)

    @override
    def _asks_to_stop(self) -> bool:
        return bool(self._strategy.stop.is_asked)

    def ask(self, kind: str) -> None:
        """Before the same batch on all ranks of the pipeline: after it the epoch ends for all, and they serve it."""
        self._pending.add(kind)
