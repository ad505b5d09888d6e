"""Records what the ranks of a pipeline really do, and draws it beside the simulator's prediction.

on every rank   Executor, transport ─► Recorder ─┐
                                                 ├─► rank 0: timeline.json, timeline.png, trace.json, a line of log
                                   ─► Recorder ─┘
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from pl_pipe.comm.common_clock import Reading, read_clocks
from pl_pipe.errors import ConfigError
from pl_pipe.runtime.recorder import RankRecord, Recorder

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_SENDS_S = 10.0  # for messages that are under way when the run ends


class PipelineTimeline(L.Callback):
    """For `strategy="pipedream"`: when each rank computed, sent and waited, over some batches of a fit.

    Before the first of these batches and after the last nothing is recorded, and nothing costs time. On CUDA the ranks
    wait for their device after every forward and backward that is recorded, so that its work counts where it belongs.
    """

    watches_executor = True

    def __init__(self, folder: str | Path | None = None, batches: int = 50, skip: int = 0) -> None:
        """
        Args:
            folder: where the files go; by default the logger's folder, or else the trainer's `default_root_dir`.
            batches: how many of the data loader's batches are recorded.
            skip: how many pass before.
        """
        for name, value, least in (("batches", batches, 1), ("skip", skip, 0)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"PipelineTimeline has {name}={value!r}; give a number of {least} or more")
        self._given = None if folder is None else Path(folder).expanduser()
        self._batches, self._skip = batches, skip
        self._folder: Path | None = None
        self._recorder: Recorder | None = None
        self._listening = False
        self._seen = 0
        self._end: int | None = None
        """The first mini-batch that is not recorded, once that is known."""
        self._drained = True
        self._clock = Reading(0.0, 0.0, 0.0)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            _pipeline(trainer)
            self._folder = _writable(trainer, self._given)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen, self._end, self._recorder, self._drained = 0, None, None, True
        self._clock = read_clocks()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self._skip:
            self._begin(trainer)
        elif self._seen == self._skip + self._batches:
            self._close_window(trainer)
        self._seen += 1
        if self._recorder is not None and self._recorder.complete:
            self._stop_listening(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._seen <= self._skip:
            rank_zero_info(f"PipelineTimeline has skip={self._skip}, and {self._seen} batches came: nothing to draw")
            return
        if self._end is None:
            self._close_window(trainer)
        self._stop_listening(trainer)
        record = None
        if self._recorder is not None:
            self._recorder.close(timeout_s=_SENDS_S)
        clock = read_clocks()
        if self._recorder is not None:
            record = self._recorder.record(clock)
        found = _gathered(record)
        if trainer.is_global_zero:
            self._write(trainer, [one for one in found if one is not None])

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop_listening(trainer)  # nothing is gathered: the other ranks may be anywhere
        if self._recorder is not None:
            self._recorder.close()

    def _begin(self, trainer: L.Trainer) -> None:
        strategy = _pipeline(trainer)
        executor, divided = strategy.executor, strategy.divided
        assert executor is not None
        assert divided is not None
        self._first = executor.entered
        if divided.stage < 0:
            return  # an idle rank: more devices than stages
        device = strategy.root_device
        self._recorder = Recorder(
            rank=trainer.global_rank,
            stage=divided.stage,
            first=self._first,
            clock=self._clock,
            synchronize=None if device.type != "cuda" else lambda: torch.cuda.synchronize(device),
        )
        executor.listen = self._recorder.acted
        divided.listen_to_messages(self._recorder)
        self._listening = True

    def _close_window(self, trainer: L.Trainer) -> None:
        executor = _pipeline(trainer).executor
        assert executor is not None
        self._end, self._drained = executor.entered, executor.begins_anew
        if self._recorder is not None:
            self._recorder.end = self._end

    def _stop_listening(self, trainer: L.Trainer) -> None:
        if not self._listening:
            return
        self._listening = False
        strategy = _pipeline(trainer)
        if strategy.executor is not None and strategy.divided is not None:
            strategy.executor.listen = None
            strategy.divided.listen_to_messages(None)

    def _write(self, trainer: L.Trainer, records: list[RankRecord]) -> None:
        from pl_pipe.report.comparison import summary, write_comparison  # matplotlib takes a second to import
        from pl_pipe.report.measured_run import MeasuredRun

        strategy = _pipeline(trainer)
        assert strategy.executor is not None
        assert strategy.divided is not None
        assert self._folder is not None
        run = MeasuredRun.starting_at_zero(
            schedule=strategy.settings.schedule,
            update_every=strategy.executor.settings.update_every,
            first=self._first,
            end=self._end,
            drained=self._drained,
            segments=tuple(sorted({start for record in records for start in record.segments})),
            clock_error_s=max(record.clock_error_s for record in records),
            plan=strategy.divided.plan,
            events=[event for record in records for event in record.events],
        )
        write_comparison(run, self._folder)
        rank_zero_info(f"{summary(run)}; timeline.png, timeline.json and trace.json are in {self._folder}")


def _pipeline(trainer: L.Trainer) -> "PipeDreamStrategy":
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy  # other runs import this package too

    if not isinstance(trainer.strategy, PipeDreamStrategy):
        raise ConfigError(
            f"PipelineTimeline records a pipeline, and the trainer's strategy is "
            f"{type(trainer.strategy).__name__}; set strategy=pipedream, or leave the callback out"
        )
    return trainer.strategy


def _writable(trainer: L.Trainer, given: Path | None) -> Path:
    """The folder, made by rank 0 before anything is trained; its error is every rank's."""
    logged = trainer.log_dir
    folder = given or Path(logged or trainer.default_root_dir)
    problem = None
    if trainer.is_global_zero:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".timeline").touch()
            (folder / ".timeline").unlink()
        except OSError as error:
            problem = f"PipelineTimeline cannot write into folder={folder} ({error}); give another one"
    problem = trainer.strategy.broadcast(problem)
    if problem is not None:
        raise ConfigError(problem)
    return folder


def _gathered(record: RankRecord | None) -> list[RankRecord | None]:
    """All ranks' records, on rank 0."""
    if not dist.is_initialized():
        return [record]
    found: list[RankRecord | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(record, found)
    return found or []
