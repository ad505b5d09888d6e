"""`strategy="pipedream"`: an unchanged LightningModule as a pipeline. Lightning's hooks -> *strategy* -> runtime.

Every rank runs Lightning's whole loop on the same batches, and of each step computes its own stage. Rank 0 has the last
stage, so that loggers, progress bar and rank-zero code see the loss.

    trainer's loop ─► optimizer_step ─► closure: training_step, backward   PipelineTraining
                                     ─► the update, and a drain where one is due
                   ─► validation_step, test_step, predict_step             PipelineEvaluation, between drains
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.comm.topology import checked_setting
from pl_pipe.errors import StageError, refuse_other_lightning
from pl_pipe.profiling.preserve import RandomState
from pl_pipe.runtime.executor import Executor
from pl_pipe.runtime.outlined_batches import Outlines
from pl_pipe.runtime.random_stream import RandomStream
from pl_pipe.runtime.shared_loading import same_batches
from pl_pipe.schedule import FLUSHING, Update
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.peer_faults import START_S, PeerFaults, refuse_broken_connections
from pl_pipe.strategies.pipeline.agreed_stop import AgreedStop, stop_lag
from pl_pipe.strategies.pipeline.averaged_copies import divide_averages
from pl_pipe.strategies.pipeline.callback import PipelineCallback
from pl_pipe.strategies.pipeline.clipping import clipping_over_stages, clipping_where_gradients_are
from pl_pipe.strategies.pipeline.common_batches import CommonBatches
from pl_pipe.strategies.pipeline.data_needs import agreed_outlines
from pl_pipe.strategies.pipeline.devices import shared_accelerator
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.evaluation import PipelineEvaluation
from pl_pipe.strategies.pipeline.hook_steps import (
    GIVEN_OUTPUTS,
    HooksEnded,
    LossesTold,
    hooks_as_steps,
    users_callbacks,
)
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher
from pl_pipe.strategies.pipeline.lockstep import LockstepTraining
from pl_pipe.strategies.pipeline.pipeline_ranks import PipelineRanks
from pl_pipe.strategies.pipeline.plan_options import plan_of, replicas_of
from pl_pipe.strategies.pipeline.ranks import any_rank_has, check_same_batch, of_all_ranks, refuse_other_processes
from pl_pipe.strategies.pipeline.settings import PipelineSettings, check_options, split_points_of
from pl_pipe.strategies.pipeline.signals import serve_signals
from pl_pipe.strategies.pipeline.step_log import StepLog, StepReports
from pl_pipe.strategies.pipeline.support import (
    check_callbacks,
    check_loggers,
    check_model,
    check_optimizers,
    nothing_is_saved,
    refuse_batch_size_finder,
    refuse_iterators,
)
from pl_pipe.strategies.pipeline.trainer_parts import (
    HooksAlike,
    batch_hooks_alike,
    loaders_counted,
    nothing_written,
    showing,
    whole_summaries,
    why_in_lockstep,
)
from pl_pipe.strategies.pipeline.training import PipelineTraining
from pl_pipe.strategies.pipeline.uncompiled import uncompiled
from pl_pipe.tensors.ghosts import outside_steps, plain
from pl_pipe.tensors.trees import map_tensors

_OF_A_RUN = ("_log", "_reports", "_epochs", "stop", "hooks_alike", "hooks_ended", "losses_told")
"""What holds on to the ways to the other ranks."""


class PipeDreamStrategy(PipelineRanks):
    """Trains a LightningModule as a pipeline. It is launched as Lightning launches DDP."""

    def __init__(
        self,
        plan: str = "auto",
        schedule: str = "pipedream",
        num_microbatches: int | None = None,
        split_points: Sequence[str] | None = None,
        replicas: Sequence[int] | None = None,
        update: Update = "round",
        cluster: str = "local",
        vertical_sync: bool = False,
        timeout_s: float = 300.0,
        wire_dtype: str | None = None,
        recompute: bool = False,
        backend: str = "auto",
        share_device: bool = False,
        load_data: str = "all",
        topology: str | Sequence[int] = "native",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        """
        Args:
            plan: `auto` measures the model on first use and makes the quickest plan, replicated stages among them;
                `straight` the quickest with one device a stage; or the path of a plan.json.
            schedule: `pipedream` (several batches in flight, weight stashing), `pipedream_2bw` (two weight versions),
                `1f1b` and `gpipe` (synchronous: as exact as a single process).
            num_microbatches: what a batch is divided into, except by `pipedream`; by default the number of stages,
                times a round where stages have replicas.
            split_points: modules after which a stage ends, instead of a plan.
            replicas: how many devices each of those stages has, such as [3, 1]; by default one.
            update: for `pipedream` with replicas: once in a `round`, in which every replica has equally many batches,
                or with each `minibatch` of a replica.
            cluster: the links that a plan counts on: `local` takes those of one machine for granted, `probe` measures
                them at setup; or the path of a cluster.json that `pl-pipe probe` wrote.
            vertical_sync: for `pipedream`: all stages use the weight version that the first one has.
            timeout_s: how long a rank waits for another before it is an error.
            wire_dtype: `bf16` or `fp16` rounds wider activations and gradients on their way.
            recompute: stages keep what they received and run their forward again for the backward.
            backend: what carries messages: `gloo`, `nccl`, or `auto`, by the devices.
            share_device: several ranks on one CUDA device; `devices` of the trainer counts ranks. Leave the trainer's
                `accelerator` out.
            load_data: `all` ranks load every batch; `needed`: only those whose stage takes tensors of it, by the first
                batch. The others get tensors without numbers.
            topology: over which the replicas of a stage add up their gradients (docs/adaptive.md).
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for DDPStrategy; the
                trainer sets those that are left out.
            unknown: refused, with the names of the options that there are.
        """
        check_options(unknown)
        self.settings = PipelineSettings(
            plan=plan_of(plan),
            schedule=schedule,
            num_microbatches=num_microbatches,
            split_points=split_points_of(split_points),
            replicas=replicas_of(replicas),
            update=update,
            cluster=str(cluster),
            vertical_sync=vertical_sync,
            timeout_s=timeout_s,
            wire_dtype=wire_dtype,
            recompute=recompute,
            backend=backend,
            share_device=share_device,
            load_data=load_data,
            topology=checked_setting(topology),
        )
        if share_device:
            accelerator = shared_accelerator(accelerator)
        start = timedelta(seconds=max(START_S, float(timeout_s)))  # processes may begin at very different times
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend="gloo",
            timeout=start,
        )
        self.faults = PeerFaults(timeout_s=float(timeout_s))
        self.leaves_together = False
        """All ranks end at the same point, so that they may still save what they have."""
        self.divided: DividedModel | None = None
        self.training: PipelineTraining | None = None
        self.lockstep: LockstepTraining | None = None
        self.evaluation: PipelineEvaluation | None = None
        self.batch_hooks = ExitStack()
        """What holds while hooks before a training step run."""
        self._stack = ExitStack()
        self._counting = ExitStack()
        """What holds while hooks before `setup` run."""
        self.is_whole = False
        """Training is over, and the model in one piece again, on every rank."""
        self.common_batches: CommonBatches | None = None
        self.same_data = False
        """Whether the ranks have compared a batch of the present epoch."""
        self._failed = False

    @property
    def is_plain(self) -> bool:
        """One rank that takes batches whole trains as it does without a pipeline, unless somebody watches it."""
        assert self.lightning_module is not None
        callbacks: Any = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        watched = any(getattr(callback, "watches_executor", False) for callback in callbacks)
        alone = self.world_size == 1 and self.is_all_there_is
        return alone and self.settings.num_microbatches in (None, 1) and not watched

    @property
    def executor(self) -> Executor | None:
        """What keeps batches in flight, while the strategy trains."""
        return None if self.training is None else self.training.executor

    # ---- data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self.world_size == 1 or self.divided is None:
            return dataloader
        return same_batches(dataloader, self.loading, broadcast=self.broadcast, through=self.outlines.through)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """An outline has nothing to move, and no hook changes it: with one, all ranks load."""
        if not self.outlines.loads:
            return batch
        if self.common_batches is not None and not self.outlines.some_load_none:
            batch = self.common_batches.of(batch, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---- setup and teardown

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
        ranks = (self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = PipelineLauncher(*ranks, faults=self.faults, explain=self._explained)

    @override
    def setup_environment(self) -> None:
        before = RandomState()
        refuse_other_processes(self.world_size)
        self._refuse_parts()
        refuse_broken_connections()
        assert self.lightning_module is not None
        if self.world_size > 1:
            refuse_batch_size_finder(self.lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        super().setup_environment()  # which seeds anew, as a single process would not
        self.leaves_together = False
        self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()
        self._begin_watch()
        state: RandomState = self.broadcast(before)
        state.restore()  # hooks that draw (a random split of the data) must draw alike on all ranks
        if self.lightning_module.trainer.state.fn is TrainerFn.FITTING:
            self._counting.enter_context(loaders_counted(self.lightning_module.trainer, self.counted))

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        fitting = trainer.state.fn is TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self._counting.close()
        self._failed = self.same_data = self.is_whole = False
        self.outlines = Outlines()
        if fitting:  # rank 0 takes what an earlier fit has left away when it plans, and ranks must have the same
            self.optimizers, self.lr_scheduler_configs = [], []
        if self.world_size > 1 or (fitting and not self.is_plain):
            refuse_iterators(trainer, module)
        if fitting and not self.is_plain:
            check_model(trainer, module, schedule=self.settings.schedule)
            if self.world_size > 1:
                callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
                check_callbacks(callbacks, schedule=self.settings.schedule, module=module)
                check_loggers(trainer.loggers)
        self.model = self.precision_plugin.convert_module(module)
        self._summaries = whole_summaries(trainer) if fitting else {}
        self.loading: RandomStream = self.broadcast(RandomStream.current())
        self._stack = ExitStack()
        if self.world_size > 1:
            self._stack.enter_context(uncompiled(module, says_so=self.is_global_zero))
        self.divided = DividedModel(trainer, self.settings)
        self.faults.know_stages(self.divided.plan)
        self._stack.callback(self.divided.close)
        if self.world_size > 1:
            divide_averages(trainer, self.divided, self._stack)
        self._prepare_trainer(trainer, module)
        if fitting:
            outlined = self.world_size > 1 and self.settings.load_data == "needed"
            counted = loaders_counted(trainer, self.counted) if outlined else nullcontext()
            with counted:
                self.setup_optimizers(trainer)  # loaders made here would not know yet who loads
            for optimizer in self.optimizers:
                self.divided.adopt(optimizer)
            if not self.is_plain:
                check_optimizers(trainer)
            for optimizer in self.optimizers:
                self.divided.keep_own_state(optimizer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        why = why_in_lockstep(module)
        if fitting and not self.is_plain and why is not None:
            self.lockstep = LockstepTraining(self, self.divided, numbers=self._numbers, log=self._log, why=why)
        elif fitting and not self.is_plain:
            self.training = PipelineTraining(
                self, self.divided, numbers=self._numbers, log=self._log, reports=self._reports
            )
        if self.world_size > 1 and self.settings.load_data == "needed":
            self.outlines = agreed_outlines(trainer, self.divided, self._log, self._stack)
            self.divided.pipe.batch_is_here = self.outlines.loads
            if self.outlines.some_load_none:
                self.hooks_alike.own_stream = RandomStream(self.broadcast(torch.initial_seed()) + 1)
        self.divided.first_batch = None

    def _prepare_trainer(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """What has to change around the strategy; `teardown` puts everything back."""
        assert self.divided is not None
        connector: Any = trainer._accelerator_connector
        self._stack.callback(setattr, connector, "use_distributed_sampler", connector.use_distributed_sampler)
        connector.use_distributed_sampler = False  # ranks share batches; Lightning would also shuffle them
        if self.is_plain:
            return
        self._numbers = self.divided.step_numbers()
        self._log = StepLog(module, reports=self.is_global_zero, is_last_stage=self.divided.is_last_stage)
        self._stack.callback(self._log.close)
        self.evaluation = PipelineEvaluation(module, self.divided, numbers=self._numbers, log=self._log)
        self._reports: StepReports | None = None
        if len(self.divided.reporters) > 1:
            self._reports = StepReports(self.divided.reporters, self._log, timeout_s=self.settings.timeout_s)
            self._stack.callback(self._reports.close)
        if self.world_size == 1:
            return
        # A collective in every batch would let the pipeline run at the pace of one batch at a time.
        self._serve_signals(trainer)
        results: Any = trainer._logger_connector
        plain = results.update_eval_epoch_metrics
        results.update_eval_epoch_metrics = lambda: self.broadcast(plain())  # what validate() and test() return
        self._stack.callback(delattr, results, "update_eval_epoch_metrics")
        predicting: Any = trainer.predict_loop
        predicted = predicting.on_run_end
        predicting.on_run_end = lambda: self.broadcast(predicted())
        self._stack.callback(delattr, predicting, "on_run_end")
        assert self.divided.plan is not None
        lag = stop_lag(self.settings, self.divided.plan)
        self.stop = AgreedStop(
            trainer, lag=lag, timeout_s=self.settings.timeout_s, within_epochs=self.stops_within_epochs
        )
        self._stack.callback(self.stop.close)
        early = self.settings.schedule not in FLUSHING
        self.common_batches = CommonBatches(
            trainer,
            self.loading,
            source=self.divided.plan.stages[0].ranks[0] if early else 0,
            timeout_s=self.settings.timeout_s,
        )
        self._stack.callback(self.common_batches.close)
        callback = PipelineCallback(self)
        callback.attach(trainer, module)
        self._stack.callback(callback.detach, trainer, module)
        self._stack.enter_context(clipping_where_gradients_are(self.precision_plugin))
        self.hooks_alike = HooksAlike(self)
        self._stack.enter_context(batch_hooks_alike(self.hooks_alike, module))
        self._stack.enter_context(showing(self._summaries))
        if self.is_all_there_is:
            self._stack.enter_context(hooks_as_steps(self, trainer, module))
        if not self.is_global_zero:
            self._stack.enter_context(nothing_written(trainer))
        if self.settings.schedule in FLUSHING:
            self._stack.enter_context(clipping_over_stages(self.precision_plugin, counts=self.divided.place == 0))

    def _begin_watch(self) -> None:
        """Over the ranks that may bring this one's run to an end."""
        self.faults.begin()

    def _serve_signals(self, trainer: L.Trainer) -> None:
        signals = serve_signals(self, trainer, self.faults, self._stack)
        assert self.faults.lifelines is not None
        lines = self.faults.lifelines
        ended = self.hooks_ended = HooksEnded(lines.send)
        losses = self.losses_told = LossesTold(lines, device=self.root_device, timeout_s=self.settings.timeout_s)

        def hear(rank: int, note: Any) -> None:
            signals.hear(rank, note)
            ended.hear(rank, note)
            losses.hear(note)

        self.faults.on_note = hear

    def _explained(self, error: BaseException, trainer: L.Trainer | None) -> BaseException:
        """What the run ends with, for an error on this rank."""
        if self.world_size == 1 or self.leaves_together or isinstance(error, _TunerExitException):
            return error
        if trainer is not None and self._all_have_met(error, trainer):
            return error
        self._failed = True
        if trainer is not None:
            nothing_is_saved(trainer, self._stack)
        return self.faults.explained(error)

    def _all_have_met(self, error: BaseException, trainer: L.Trainer) -> bool:
        """The same error at the same batch. Then the ranks end it together, but for what was in flight."""
        if not (self.is_all_there_is and isinstance(error, Exception)):
            return False  # ranks that are not at the same point, or whose user wants an end at once
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if not self.faults.is_everybodys(error, point=f"{trainer.state.fn}, {batches} training batches"):
            return False
        self.leaves_together = True
        self.training = self.lockstep = None
        if self.divided is not None:
            self.divided.drops_messages = True
        assert isinstance(self._launcher, PipelineLauncher)
        self._launcher.has_recovered()
        return True

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = not self.leaves_together  # other ranks may be anywhere: no collective from here on
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.batch_hooks.close()
        self._counting.close()
        if self.divided is not None and not self._failed:
            self.become_whole()
            if self.world_size > 1:
                if self.outlines.some_load_none:
                    self.loading = self.broadcast(self.loading)  # ranks that loaded nothing have drawn nothing
                self.loading.become_current()  # what follows draws as after a single run, alike on all ranks
        self._stack.close()
        module, self.training, self.lockstep, self.evaluation = self._lightning_module, None, None, None
        for name in _OF_A_RUN:
            vars(self).pop(name, None)
        if (self.divided is not None and self._failed) or self._has_parts():
            self._lightning_module = None  # Lightning would move it to the host, which parts that are not here cannot
        self.divided = self.common_batches = None
        self._part()
        self.faults.end()
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def become_whole(self) -> None:
        """Gives every rank the whole model, when nothing more is trained or evaluated; all ranks at the same point."""
        if self.divided is not None and not self.is_whole:
            assert self.lightning_module is not None
            self.divided.reunite(self.optimizers, users_callbacks(self.lightning_module.trainer))
            self.is_whole = True

    def _part(self) -> None:
        """Nothing is left to be done but to say farewell."""

    # ---- training

    @contextmanager
    def hook_step(
        self, name: str, *, kept_by: Mapping[str, Any] | None = None, with_gradients: bool = False
    ) -> Iterator[None]:
        """Within the block a hook of the user's runs, on all ranks.

        Args:
            kept_by: what may keep values besides the model; first of all, all ranks get those. None within an epoch.
        """
        late = with_gradients and self.settings.schedule not in FLUSHING
        if self.divided is None or self.is_whole or self.world_size == 1 or late:
            yield  # ranks that are at different batches have gradients of different ones
            return
        if with_gradients:
            with outside_steps():
                self.divided.pipe.show_gradients(any_rank_has)
            try:
                with self.hook_step(name):
                    yield
            finally:
                self.divided.pipe.hide_gradients()
            return
        pipe, number = self.divided.pipe, self._numbers.hooked()
        ended = self.hooks_ended
        assert ended is not None
        if name == GIVEN_OUTPUTS and self.training is not None and self.losses_told is not None:
            self.training.make_outputs_known(self.losses_told, self.broadcast)
        flushed = self.settings.schedule in FLUSHING and pipe.has_left and self.divided.all_run_steps
        if kept_by is not None or flushed:
            pipe.share_kept(kept_by or {}, of_all_ranks)
        with (
            self.divided.attended(ended.look),
            ended.during(name, number),
            pipe.hook(number, draws=nullcontext() if self.hooks_alike.is_entered else None) as step,
            self._log.hearing_hook(step, self.broadcast),
        ):
            yield

    @property
    def computes_next_batch(self) -> bool:
        """For callbacks: Lightning calls their hooks for batches of other replicas too."""
        return self.training is None or self.training.computes_next_batch

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_hooks.close()  # Lightning has called everybody's

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.lockstep is not None:
            self._compare_data(args[0])
            return self.lockstep.training_step(args[0], args[1:], kwargs)
        if self.training is None:
            return super().training_step(*args, **kwargs)
        self._compare_data(args[0])
        return self.training.training_step(args[0], args[1:], kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.lockstep is not None:
            run = super().backward
            return self.lockstep.backward(lambda loss: run(loss, optimizer, *args, **kwargs), closure_loss)
        if self.training is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self.training.backward(closure_loss)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        if self.lockstep is not None:
            run = super().optimizer_step
            return self.lockstep.optimizer_step(optimizer, closure, lambda own, given: run(own, given, model, **kwargs))
        if self.training is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        return self.training.optimizer_step(optimizer, closure, **kwargs)

    def drain(self) -> None:
        """Finishes all that is in flight; all ranks do so at the same point."""
        if self.training is not None and not self._failed and not self.is_whole:
            with outside_steps():
                self.training.drain()

    # ---- evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.evaluation is None:
            return super().validation_step(*args, **kwargs)
        return self._evaluated("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.evaluation is None:
            return super().test_step(*args, **kwargs)
        return self._evaluated("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.evaluation is None:
            return super().predict_step(*args, **kwargs)
        return self._evaluated("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _evaluated(
        self, hook: str, context: AbstractContextManager[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        assert self.evaluation is not None
        self._compare_data(args[0])
        output = self.evaluation.step(hook, context, args, kwargs)
        if hook == "predict_step":  # which Lightning collects
            return map_tensors(output, plain) if self.reports else None
        return output

    def compare_data_anew(self) -> None:
        """The loops begin with other batches."""
        self.same_data = False
        if self.common_batches is not None:
            self.common_batches.compare_anew()

    def _compare_data(self, batch: Any) -> None:
        """Once an epoch, before anything is in flight."""
        if not self.same_data and self.world_size > 1:
            check_same_batch(batch if self.outlines.loads else None)
            self.same_data = True

    # ---- state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.divided is None or self.is_whole:  # every rank has the whole model
            self._refuse_parts()
            return super().lightning_module_state_dict()
        self.drain()
        with outside_steps():
            return self.divided.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.divided is None or self.is_whole:
            return super().optimizer_state(optimizer)
        self.drain()
        with outside_steps():
            return self.divided.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        with outside_steps():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.divided is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self.divided.load_optimizer_state(optimizer, state)

    def _has_parts(self) -> bool:
        """And not the whole model, though it is not divided."""
        module = self._lightning_module
        return self.divided is None and module is not None and any(one.is_meta for one in module.parameters())

    def _refuse_parts(self) -> None:
        """After a run that failed on one rank alone the model cannot be put together again."""
        module = self._lightning_module
        if self._has_parts():
            raise StageError(
                f"the last run failed, and rank {self.global_rank} has only its own stage of {type(module).__name__}; "
                f"start the script again from its last checkpoint, or load that into a new {type(module).__name__} and "
                f"go on with one device"
            )
