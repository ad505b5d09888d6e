"""The training of a pipeline, as Lightning's loop calls for it. PipeDreamStrategy -> *this* -> Executor, optimizer.

training_step    forwards of this batch, backwards that are due
backward         the gradients of an update, if one is due, get into place
optimizer_step   the update itself, with the learning rate of its batch; a drain where one is due

Schedules that flush leave gradients where a single process has them, in the parameters: they add up there, until
whatever stands in `optimizer_zero_grad` clears them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from pl_pipe.errors import StageError
from pl_pipe.log import get_logger
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.runtime.executor import Executor
from pl_pipe.runtime.micro_batches import MicroBatch, combined, divided_or_whole, least_samples
from pl_pipe.runtime.mini_batch import MiniBatch, Update
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.schedule import FLUSHING
from pl_pipe.stages.habits import signature_of
from pl_pipe.stages.loss_counts import BatchInParts, LossListener, Site, TargetOf, loss_calls_heard
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.hook_steps import LossAlone, LossesTold
from pl_pipe.strategies.pipeline.scheduled_settings import named_settings, settings_of, with_settings
from pl_pipe.strategies.pipeline.step_log import StepLog, StepReports
from pl_pipe.strategies.pipeline.trainer_parts import drawing_alike
from pl_pipe.tensors.ghosts import home_of, plain, settle
from pl_pipe.tensors.trees import map_tensors

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy


_log = get_logger(__name__)


class PipelineTraining:
    """One rank's training between `setup` and `teardown`."""

    def __init__(
        self,
        strategy: "PipeDreamStrategy",
        divided: DividedModel,
        *,
        numbers: StepNumbers,
        log: StepLog,
        reports: StepReports | None,
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._precision = strategy.precision_plugin
        self._divided = divided
        self._numbers = numbers
        self._log = log
        self._reports = reports
        settings = strategy.settings.for_rank(
            divided.plan, strategy.global_rank, accumulate=self._module.trainer.accumulate_grad_batches
        )
        divided.share_settings(partial(named_settings, strategy.optimizers[0]))
        averaging, pipelines = strategy.gradient_averaging(divided)
        self.executor = Executor(
            stepper=divided.stepper,
            parameters=divided.own_parameters(),
            settings=replace(settings, averaged=settings.averaged * pipelines),
            numbers=numbers,
            averaging=averaging,
        )
        self._flushing = self.executor.settings.schedule in FLUSHING
        count = strategy.settings.microbatches(divided.plan)
        divided.divide_batches(whole=self._flushing and count == 1, in_parts=count > 1)
        self._stepping = self._seeded = False
        self._outputs: tuple[list[Any], list[float]] = [], []
        """What the last batch's steps returned, None where this rank left one early, and their shares of the batch."""
        self._batches = 0
        self._known_to_all = False
        """No rank was elsewhere when the steps returned; or what could be done about it has been done."""
        self._told: LossesTold | None = None
        """What tells this rank their loss, if it knows no better."""
        self._short = False
        """The last batch had too few samples for all its micro-batches."""
        self._least_samples = least_samples(self._module)
        self._due: Update | None = None
        self._loss_calls: dict[Any, Mapping[Site, TargetOf]] = {}
        """Those that divide by a number of targets, by what a micro-batch looks like."""

    @property
    def computes_next_batch(self) -> bool:
        """No replica of this rank's stage does it in its place."""
        return self.executor.takes_one_of(self._strategy.settings.microbatches(self._divided.plan))

    def training_step(self, batch: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the user's step returned, on the rank that reports; elsewhere something of its form."""
        if not self._seeded:  # not before: hooks that make data draw from what is still alike on all ranks
            self._divided.seed_stage()
            self._seeded = True
        count = self._strategy.settings.microbatches(self._divided.plan)
        wanted = self._strategy.settings.num_microbatches is not None
        parts = divided_or_whole(batch, count, least=self._least_samples, wanted=wanted)
        listeners = self._weighed(parts, others, kwargs) if len(parts) > 1 else [None]
        mini_batches = [
            MiniBatch(content=part.content, run=self._run(part, listener, others, kwargs))
            for part, listener in zip(parts, listeners, strict=True)
        ]
        first = self.executor.arrived
        earlier = self._gradients() if self._flushing and not self._clears_gradients() else {}
        self._due = self.executor.advance(mini_batches, partial(settings_of, self._strategy.optimizers[0]))
        self._divided.wait_for_sends(before=self._numbers.next - self._divided.in_flight - 2 * count)
        self._short = len(parts) < count
        if self._short and not self.executor.settings.versioned:
            # Before Lightning clears the gradients; a replica whose last part the batch had is not left to be drained.
            (self._due,) = (update for update in (self._due, *self.executor.drain()) if update is not None)
        if self._flushing:  # for `optimizer_zero_grad`, which comes next
            self.executor.hand_over(Update(earlier, None))
        if self._reports is not None:
            self._reports.exchange(first)
        outputs = [record.output for record in self._log.records]
        self._log.end()
        self._outputs = map_tensors(outputs, _where_it_is), [part.share for part in parts]
        divided, self._told = self._divided, None
        self._known_to_all = divided.plan is None or (divided.all_run_steps and not divided.pipe.has_left)
        self._batches += 1
        if self._strategy.reports:
            return map_tensors(combined(*self._outputs), plain)
        unknown = torch.tensor(torch.nan)  # the loss is on the last stage
        if isinstance(outputs[0], Mapping):
            return {**dict.fromkeys(outputs[0]), "loss": unknown}
        return unknown

    def outputs_for_hook(self) -> Mapping[str, Any]:
        """What `on_train_batch_end` is given."""
        if self._told is not None and not self._strategy.reports:
            return LossAlone(partial(self._told.of, self._batches))
        output = combined(*self._outputs)
        given = output if isinstance(output, Mapping) else {"loss": output}
        return {**given, "loss": given["loss"] / self._module.trainer.accumulate_grad_batches}

    def make_outputs_known(self, losses: LossesTold, share: Callable[[Any], Any]) -> None:
        """Before a hook that is given them, where ranks have been elsewhere when the step returned.

        Schedules that flush give all ranks what rank 0 has, by `share`. Others would wait for it, so that ranks are
        told the loss, and come to wait where they look at it.
        """
        if self._known_to_all:
            return
        self._known_to_all = True
        if self._strategy.reports:
            self._outputs = map_tensors(self._outputs[0], plain), self._outputs[1]
        if self._flushing:
            shared = share(map_tensors(self._outputs[0], Tensor.cpu) if self._strategy.reports else None)
            device = self._strategy.root_device
            self._outputs = map_tensors(shared, lambda tensor: tensor.to(device)), self._outputs[1]
            return
        self._told = losses
        losses.forget(before=self._batches)
        if self._strategy.reports:
            losses.tell(self._batches, self.outputs_for_hook())

    def _weighed(
        self, parts: Sequence[MicroBatch], others: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Sequence[LossListener | None]:
        """What gives the losses of each part their weight in the batch."""
        if not self._divided.loads_batches:
            return [None] * len(parts)
        calls, epoch = [], self._module.trainer.current_epoch  # on which a mask may depend
        for part in parts:
            key = epoch, signature_of(part.content)
            if key not in self._loss_calls:
                self._loss_calls = {known: calls for known, calls in self._loss_calls.items() if known[0] == epoch}
                self._loss_calls[key] = self._found_calls(part.content, others, kwargs)
            calls.append(self._loss_calls[key])
        batch = BatchInParts(calls, [part.content for part in parts], [part.share for part in parts])
        return [batch.listener(place) for place in range(len(parts))]

    def _found_calls(self, batch: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[Site, TargetOf]:
        random_state, model_state = RandomState(), ModelState(self._module, weights=False)
        moved = map_tensors(batch, Tensor.clone)

        def run(step: Any) -> None:
            with self._log.hearing(step), self._precision.train_step_context(), drawing_alike(step):
                self._module.training_step(moved, *others, **kwargs)

        try:
            return self._divided.pipe.loss_calls(moved, run)
        except Exception as error:  # it will be met again, or the losses that are not found will be warned of
            _log.info("the losses of the step were not looked at ahead: %r", error)
            return {}
        finally:
            self._log.records.clear()
            model_state.restore()
            random_state.restore()

    def _run(
        self,
        part: MicroBatch,
        listener: LossListener | None,
        others: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Callable[[Any], Tensor | None]:
        share = part.share / self._module.trainer.accumulate_grad_batches

        def run(step: Any) -> Tensor | None:
            with self._log.hearing(step, part.share) as record:
                weighing = nullcontext() if listener is None else loss_calls_heard(listener)
                with self._precision.train_step_context(), drawing_alike(step), weighing:
                    output = self._module.training_step(part.content, *others, **kwargs)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    raise StageError(
                        f"training_step of {type(self._module).__name__} returned {type(output).__name__}, not a loss; "
                        f"a pipeline cannot skip a batch: return a loss of zero, such as loss * 0 (momentum and weight "
                        f"decay still act)"
                    )
                record.output = map_tensors(output, step.bring)
            return loss if share == 1.0 else loss * share

        return run

    def backward(self, closure_loss: Tensor) -> Tensor:
        """Backwards have run by now; here the update that is due, if there is one, gets its gradients into place."""
        closure_loss = self._precision.pre_backward(closure_loss, self._module)
        if self._due is not None:
            if self._flushing:
                self._due = self._due.added_to(self._gradients())  # what has been left of earlier ones
            self.executor.hand_over(self._due)
        closure_loss = self._precision.post_backward(closure_loss, self._module)
        if self._stepping:
            return closure_loss
        if not self._flushing:
            self._check_accumulating()
            if self._due is not None:
                self._apply(self._due)  # of batches that entered earlier: the executor has waited for all that share it
            if self._short:
                self._strategy.drain()  # with fewer parts than the others it would shift the next updates' bounds
        self._due = None
        return closure_loss

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.executor.parameters.items() if p.grad is not None}

    def _clears_gradients(self) -> bool:
        """Lightning will, after this batch's step: then nothing has to be kept while that runs.

        Not where the module does it in its own way, which may be to leave them.
        """
        trainer = self._module.trainer
        is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        return is_first and not is_overridden("optimizer_zero_grad", self._module)

    def _check_accumulating(self) -> None:
        """A closure that runs without an update must be Lightning's, which counts on one after further batches."""
        if not self._module.trainer.fit_loop._should_accumulate():
            raise StageError(
                f"optimizer_step of {type(self._module).__name__} ran its closure at batch "
                f"{self._module.trainer.fit_loop.epoch_loop.batch_idx} without optimizer.step(closure=…), but under "
                f"schedule={self.executor.settings.schedule} an update has batches that entered earlier, and cannot be "
                f"left out for this one; call optimizer.step for every batch, or set schedule=1f1b"
            )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the batch, and applies the update that came of it: that of this batch, or of one that entered before."""

        def run() -> Any:
            self._stepping = True
            try:
                return closure()
            finally:
                self._stepping = False

        result, calls = run(), 0

        def for_optimizer() -> Any:
            """It has run once, with the weights as they are at the optimizer's first call."""
            nonlocal calls
            calls += 1
            if calls > 1 and not self._flushing:
                raise StageError(
                    f"{type(optimizer).__name__}.step calls its closure more than once, but under "
                    f"schedule={self.executor.settings.schedule} a batch runs while others are in flight, and cannot "
                    f"run again; set schedule=1f1b"
                )
            return result if calls == 1 else run()

        optimizer._opt_called = True  # type: ignore[attr-defined]  # late is not forgotten: torch would warn of it
        update, self._due = self._due, None
        if update is not None or self._flushing:  # then the gradients may be of a closure that ran before
            self._apply(update, for_optimizer, **kwargs)
        if self._short or self._drain_is_due():
            self._strategy.drain()
        return result

    def _apply(self, update: Update | None, closure: Callable[[], Any] = lambda: None, **kwargs: Any) -> None:
        self.executor.begin_update()
        optimizer = self._strategy.optimizers[0]
        self._strategy.before_update()
        settings = None if update is None or self._flushing else update.settings
        with nullcontext() if settings is None else with_settings(optimizer, settings):
            self._precision.optimizer_step(optimizer, model=self._module, closure=closure, **kwargs)
        self._strategy.after_update()
        self.executor.end_update()

    def drain(self) -> None:
        """Finishes all that is in flight."""
        for update in self.executor.drain():
            self.executor.hand_over(update)
            self._apply(update)
        self._divided.agree_on_buffers()

    def _drain_is_due(self) -> bool:
        """Whether Lightning will look at the weights before the next batch."""
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        with self._strategy.stop.unheeded() if self._strategy.world_size > 1 else nullcontext():
            return (
                loop._num_ready_batches_reached()
                or trainer.global_step + 1 == trainer.max_steps
                or loop._should_check_val_fx(fetcher)
            )


def _where_it_is(tensor: Tensor) -> Tensor:
    """The same, in no step any more, with the stage that has its numbers."""
    home = home_of(tensor)
    return plain(tensor) if home is None else settle(plain(tensor), home)
