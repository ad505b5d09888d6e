"""Training steps that run backward or optimizers themselves: whole batches, one at a time. PipeDreamStrategy -> *this*.

Manual optimization, several optimizers, an overridden `backward`. All ranks run the same Python in step, each operation
where its tensors are, so that nothing overlaps: slower than one device, and equal to it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from pl_pipe.log import get_logger
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.stages import PipeStep
from pl_pipe.strategies.pipeline.clipping import norms_over_stages
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.ranks import any_rank_has
from pl_pipe.strategies.pipeline.step_log import StepLog
from pl_pipe.strategies.pipeline.trainer_parts import drawing_alike
from pl_pipe.tensors.ghosts import in_step, outside_steps, plain
from pl_pipe.tensors.trees import map_tensors

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_log = get_logger(__name__)


class LockstepTraining:
    """One rank's training between `setup` and `teardown`."""

    def __init__(
        self, strategy: "PipeDreamStrategy", divided: DividedModel, *, numbers: StepNumbers, log: StepLog, why: str
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy, self._divided, self._numbers, self._log = strategy, divided, numbers, log
        self._module = strategy.lightning_module
        self._step: PipeStep | None = None
        self._loss: Any = None
        if strategy.is_global_zero:
            _log.warning(
                "%s, so each batch goes through the stages whole, and the next one begins when it has ended: memory is "
                "divided among the devices, but they wait for one another",
                why,
            )  # fmt: skip

    def training_step(self, batch: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        pipe, module = self._divided.pipe, self._module
        if self._step is not None:
            self._step.end()
        number = self._numbers.trained()
        draws = self._strategy.loading  # from which a single process would draw them, too
        with pipe.lockstep(number, self._show_gradients, draws=draws) as step, self._log.hearing(step) as record:
            self._step = step
            with self._strategy.precision_plugin.train_step_context(), drawing_alike(step), self._alone_in_step():
                output = module.training_step(batch, *others, **kwargs)
            self._loss = output.get("loss") if isinstance(output, Mapping) else output
            record.output = map_tensors(output, step.bring)
        shown = record.output
        self._log.end()
        if module.automatic_optimization and isinstance(self._loss, Tensor) and not self._strategy.reports:
            unknown = torch.tensor(torch.nan)
            return {**dict.fromkeys(output), "loss": unknown} if isinstance(output, Mapping) else unknown
        return map_tensors(shown, plain)

    def backward(self, run: Callable[[Tensor], Any], closure_loss: Tensor) -> Tensor:
        """Lightning's own, with the module's, on the loss of this batch."""
        if in_step():  # by `manual_backward`
            run(closure_loss)
            return closure_loss
        assert self._step is not None
        accumulated = self._module.trainer.accumulate_grad_batches
        with self._step.again():
            run(self._loss / accumulated if accumulated > 1 else self._loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[..., Any]) -> Any:
        """Optimizers of torch change each parameter by itself; others may look at all of them."""
        step = self._step
        if not in_step() or step is None:
            with self._gradients_hidden():
                return run(optimizer, closure)
        if not type(optimizer).__module__.startswith("torch."):
            return run(optimizer, closure)

        def in_this_step() -> Any:
            with step.again():
                return closure()

        with outside_steps(), self._gradients_hidden():
            return run(optimizer, in_this_step)

    def drain(self) -> None:
        """Nothing is ever in flight."""
        self._divided.agree_on_buffers()

    def _show_gradients(self) -> None:
        self._divided.pipe.show_gradients(any_rank_has)

    @contextmanager
    def _gradients_hidden(self) -> Iterator[None]:
        """Within the block parameters of other stages have none, and an optimizer passes them by."""
        shown = [(parameter, parameter.grad) for parameter in self._module.parameters() if parameter.is_meta]
        for parameter, _ in shown:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in shown:
                parameter.grad = gradient

    @contextmanager
    def _alone_in_step(self) -> Iterator[None]:
        """Within the block, what looks at all gradients does so stage by stage, without moving them."""
        plain_clip, plain_norm = self._module.clip_gradients, clip_grad.clip_grad_norm_

        def clip(*args: Any, **kwargs: Any) -> None:
            with outside_steps(), self._gradients_hidden():
                plain_clip(*args, **kwargs)

        def clip_norm(*args: Any, **kwargs: Any) -> Any:
            if not in_step():
                return plain_norm(*args, **kwargs)
            with outside_steps(), self._gradients_hidden(), norms_over_stages(counts=True):
                return plain_norm(*args, **kwargs)

        stored: Any = vars(self._module)
        stored["clip_gradients"] = clip
        utilities: Any = torch.nn.utils
        utilities.clip_grad_norm_ = clip_grad.clip_grad_norm_ = clip_norm
        try:
            yield
        finally:
            stored.pop("clip_gradients", None)
            utilities.clip_grad_norm_ = clip_grad.clip_grad_norm_ = plain_norm
