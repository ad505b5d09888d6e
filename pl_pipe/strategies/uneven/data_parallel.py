"""Data parallelism among workers that are not equally fast. Lightning's hooks -> *strategy* -> synchronizer.

Every rank is a worker with the whole model. What happens after a step is the synchronizer's
(`pl_pipe.comm.synchronizers`); who gets which batch, the samplers' (`pl_pipe.runtime.uneven_samplers`); and an epoch
ends for all at once (`pl_pipe.strategies.uneven.epochs`). There is no collective of torch.distributed on the way:
workers meet at a coordinator on rank 0, which knows who lives.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.comm.coordination.tickets import StoreTickets
from pl_pipe.comm.lifelines import Fault
from pl_pipe.comm.synchronizers import Synchronizer
from pl_pipe.errors import refuse_other_lightning
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.peer_faults import START_S, PeerFaults
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher
from pl_pipe.strategies.pipeline.support import nothing_is_saved
from pl_pipe.strategies.uneven.assembly import Assembly
from pl_pipe.strategies.uneven.epochs import UnevenEpochs
from pl_pipe.strategies.uneven.loading import UnevenLoading
from pl_pipe.strategies.uneven.membership import Membership, ModelTensors, said_by_coordinator
from pl_pipe.strategies.uneven.report import UnevenReport
from pl_pipe.strategies.uneven.rules import make_rule
from pl_pipe.strategies.uneven.settings import UnevenSettings, checked_launch
from pl_pipe.strategies.uneven.support import check_model, check_optimizers, check_trainer, check_workers

_RUNS = itertools.count()
"""Of this process; all ranks count alike, and names in the store must not be used twice."""


class DataParallelStrategy(DDPStrategy):
    """Workers that train the same model, each on batches of its own. It is launched as Lightning launches DDP."""

    has_whole_gradients = False
    """Most rules average weights: each worker has gradients of its own, and no mean of them."""

    def __init__(
        self,
        synchronizer: str = "allreduce",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """
        Args:
            synchronizer: `allreduce`, `partial_reduce`, `ad_psgd`, `sma`, `pair`, `wave` or `local`.
            options: of the synchronizer, and `on_fault`, `timeout_s`; see `pl_pipe.strategies.uneven.settings`.
        """
        known = {name: options.pop(name) for name in list(options) if name in UnevenSettings.__dataclass_fields__}
        checked_launch(options, type(self).__name__)
        self.settings = UnevenSettings(synchronizer=synchronizer, **known)
        start = timedelta(seconds=max(START_S, float(self.settings.timeout_s)))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend="gloo",
            timeout=start,
        )
        self.faults = PeerFaults(timeout_s=float(self.settings.timeout_s))
        self.leaves_together = False
        """All workers end at the same point, so that they may still save what they have."""
        self.member = Membership(self.settings)
        self._stack = ExitStack()
        self._failed = False

    @property
    def assembly(self) -> Assembly:
        assert self.member.assembly is not None
        return self.member.assembly

    @property
    def rule(self) -> Synchronizer:
        assert self.member.rule is not None
        return self.member.rule

    @property
    def report(self) -> UnevenReport:
        return self.member.report

    @property
    def trained_samples(self) -> int:
        """Of all workers in this fit, when an epoch has ended."""
        return self.report.samples

    @property
    def living(self) -> list[int]:
        """Workers that came to the last reunion."""
        return self.member.living

    @property
    def place(self) -> int:
        """Of this worker among those that live."""
        return self.living.index(self.global_rank)

    @property
    def saves_within_epochs(self) -> bool:
        return self.settings.lockstep

    # ---- what Lightning asks about ranks

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.member.assembly is not None and not self._failed:
            self.member.assembly.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.member.assembly is None else self.member.assembly.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        return tensor if self.member.assembly is None else self.member.assembly.reduce(tensor, reduce_op)

    @override
    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        return tensor if self.member.assembly is None else self.member.assembly.all_gather(tensor)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self.member.assembly is None else self.member.assembly.agrees(decision, all_=all)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For samplers of a user's own: where batches are dealt out, each has all samples."""
        loading = getattr(self, "_loading", None)
        if loading is not None and loading.deals:
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        loading = getattr(self, "_loading", None)
        return dataloader if loading is None else loading.process(dataloader)

    # ---- setup and teardown

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
        ranks = (self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = PipelineLauncher(
            *ranks,
            faults=self.faults,
            explain=self._explained,
            spares_others=self.settings.survives,
            check=partial(check_workers, self.settings, self.num_nodes * self.num_processes),
        )

    @override
    def setup_environment(self) -> None:
        self.member.refuse_gaps()
        super().setup_environment()
        self.leaves_together = self._failed = False
        self.member.expect(range(self.world_size))
        self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()
        self._stack = ExitStack()
        if self.world_size == 1:
            return
        self.faults.tolerates = self._goes_on_without
        self.faults.begin()
        self.run_name = f"pl_pipe/uneven{next(_RUNS)}"
        everyone = {"all": tuple(range(self.world_size))}
        self.member.begin(self.global_rank, self.run_name, everyone, self.faults)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn is TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fitting:
            check_model(trainer, module)
            check_trainer(trainer, self.settings)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.world_size > 1:
            self.member.join(range(self.world_size), self._own_tensors())
            self._stack.callback(self._close_quietly, self.member.exchange.close)
            self._stack.enter_context(self.assembly.evaluations_of(trainer))
        if fitting:
            self._prepare_trainer(trainer, module)
            with self._loading.lengths_known():
                self.setup_optimizers(trainer)
            check_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            backend = "nccl" if self.root_device.type == "cuda" and torch.distributed.is_nccl_available() else "gloo"
            self.member.make_rule(self._own_tensors().parameters, partial(make_rule, self.settings, backend=backend))

    def _own_tensors(self) -> ModelTensors:
        module = self.lightning_module
        assert module is not None
        return ModelTensors(dict(module.named_parameters()), dict(module.named_buffers()))

    def _prepare_trainer(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """What has to change around the strategy; `teardown` puts everything back."""
        self._loading = UnevenLoading(
            self,
            trainer,
            self._stack,
            workers=self.world_size,
            lockstep=self.settings.lockstep,
            tickets=StoreTickets(self.run_name),
        )
        self._stack.callback(delattr, self, "_loading")
        UnevenEpochs(self, trainer, self._stack, loading=self._loading)
        self._stack.enter_context(self.assembly.metrics_of(module))
        self.report.attach(trainer, rank=self.global_rank)
        self._stack.callback(self.report.detach, trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # others may be anywhere: no meeting from here on
        super().on_exception(exception)

    def _explained(self, error: BaseException, trainer: L.Trainer | None) -> BaseException:
        """What the run ends with, for an error on this rank."""
        if self.world_size == 1 or self.leaves_together or isinstance(error, _TunerExitException):
            return error
        self._failed = True
        if trainer is not None:
            nothing_is_saved(trainer, self._stack)
        explained = self.faults.explained(said_by_coordinator(error))
        self.member.fail(explained, self.faults)
        return explained

    @override
    def teardown(self) -> None:
        self.member.end_rule(failed=self._failed)
        self.member.leave(failed=self._failed)
        self._stack.close()
        self.member.close()
        self.faults.end()
        super().teardown()

    def _close_quietly(self, close: Callable[[], None]) -> None:
        if not self._failed:
            close()

    # ---- faults

    def _goes_on_without(self, fault: Fault) -> bool:
        """By the lifelines' thread. Rank 0 decides for the others and keeps the store, so nobody does without it."""
        if not self.settings.survives or fault.rank == 0 or self.member.rule is None:
            return False
        left = self.world_size - len(self.member.gone | {fault.rank})
        self.member.lose(fault, [fault.rank], then=f"training goes on with {left} worker(s)")
        return True

    # ---- training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.member.enter()
        if self._begins_update():
            self.rule.begin_step()
        self.report.count(args[0])
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._accumulates():
            self.rule.begin_backward()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's; hooks after the backward find, and may change, the gradients that the update takes."""
        module: Any = self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if not self._accumulates():
            self.rule.before_update()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.member.updated()
        return output

    def _accumulates(self) -> bool:
        return bool(self.lightning_module.trainer.fit_loop.epoch_loop._should_accumulate())  # type: ignore[union-attr]

    def _begins_update(self) -> bool:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return int(ready - 1) % int(trainer.accumulate_grad_batches) == 0

    # ---- the end of an epoch

    def stop_epoch(self) -> None:
        """No worker gets another batch in this epoch."""
        self._loading.stop()

    def unite(self, content: dict[str, Any]) -> dict[int, Any]:
        """All workers have no more batches: everything is averaged. Returns what each brought."""
        return self.member.unite(content, self._own_tensors(), self.optimizers, self._loading)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.settings.lockstep or self.member.may_save(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
