"""The optimizers' steps of all variants as one CUDA graph. gradients -> *replay* -> parameters.

Learning rates are tensors while the steps are captured, so that schedules reach them; what else a schedule or a user
changes is compared before each replay, and where it is not as it was, the optimizers step as ever. So do those of
parameters in double precision: torch's fused kernels take learning rates in single precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pl_pipe.fusion.replay import Branch, Capture, captured, nothing
from pl_pipe.log import get_logger

log = get_logger(__name__)

_KNOWN = (Adam, AdamW, SGD)
"""Their fused kernels take a learning rate from memory, and need nothing of Python while they run."""
_SETTLED = 2
"""Steps of the optimizers themselves, in which they make their state."""
_MISSES = 4
"""Steps in a row that a capture does not hold for, before another is made."""
CAPTURES = 2
"""The most that are made before it is taken for granted that settings change from step to step."""
_LARGEST = torch.finfo(torch.float32).max
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_LR, _STEP, _PARAMETERS = "lr", "step", "params"


class ReplayedOptimizers:
    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._optimizers = list(optimizers)
        self._device = device
        self._gradients: list[Tensor | None] = []
        self._settings: list[dict[str, Any]] = []
        self._rates: list[float] = []
        self._rate_tensors: list[Tensor] = []
        self._states: list[list[tuple[str, Any]]] = []
        """What optimizers keep of their parameters: a graph reads and writes that memory, whoever else lets it go."""
        self._kept: list[tuple[int, Any]] = []
        """Of each optimizer: of how many parameters it keeps something, and what of the first."""
        self._steps = 0
        self._misses = 0
        self._given_up = 0
        self._failed = False
        self._capture: Capture | None = None
        self._is_joined = self._has_stepped = False
        self._take_groups()

    def step(self) -> bool:
        """Whether all have stepped; otherwise they are to do so themselves."""
        if self._has_stepped:
            self._has_stepped = False
            return True
        if self._failed or self._is_joined or self._device.type != "cuda":
            self._steps += 1
            return False
        if self._capture is not None:
            if self._holds():
                self._misses = 0
                self._set_rates()
                self._capture.replay()
                return True
            self._misses += 1  # another shape of batch, say; or things have changed for good
            if self._misses < _MISSES:
                return False
            self._capture, self._steps, self._misses = None, 0, 0
            self._given_up += 1
            if self._given_up == CAPTURES:  # a schedule of momentum, say
                self._failed = True
                self.plain_steps()
                return False
        if self._steps < _SETTLED or not self._are_still():
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._steps += 1
            return False
        try:
            self._capture = self._captured()
        except Exception as error:
            log.warning("optimizers step one by one: %s", str(error).splitlines()[0])
            self._failed = True
            self.plain_steps()
            return False
        self._set_rates()
        self._capture.replay()
        return True

    @property
    def can_join(self) -> bool:
        """Whether the steps may be part of another graph: the optimizers have their state by now."""
        return not self._failed and self._steps >= _SETTLED

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Around a capture that holds the optimizers' steps as well."""
        self._note_settings()
        with self._as_captured():
            yield
        self._is_joined = True
        self._capture = None

    def step_of(self, place: int) -> None:
        self._optimizers[place].step()

    def before_joined(self) -> bool:
        """Whether what was captured still holds; if so, the replay that follows steps for all."""
        if self._settings_hold():
            self._set_rates()
            self._has_stepped = True
            return True
        self._is_joined, self._steps = False, 0
        return False

    def plain_steps(self) -> None:
        """Counters of steps are where the optimizers themselves keep them, as checkpoints of plain runs have it."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if not group.get("fused") and not group.get("capturable"):
                    _move_steps(optimizer, group, torch.device("cpu"))

    def _are_still(self) -> bool:
        """Gradients lie where they did: a replay writes them, not Python."""
        return len(self._gradients) == len(self._parameters) and all(
            parameter.grad is gradient for parameter, gradient in zip(self._parameters, self._gradients, strict=True)
        )

    def _holds(self) -> bool:
        return self._are_still() and self._settings_hold()

    def _settings_hold(self) -> bool:
        if self._sizes != [(id(group), len(group[_PARAMETERS])) for group in self._all_groups()]:
            self._take_groups()
            return False
        if any(
            len(one.state) != count or _first_state(one) is not first
            for one, (count, first) in zip(self._optimizers, self._kept, strict=True)
        ):
            return False  # begun anew, by a restart of Adam, say
        return all(
            group[name] == value
            for group, settings in zip(self._groups, self._settings, strict=True)
            for name, value in settings.items()
        )

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def _take_groups(self) -> None:
        """A hook may have added some, which no capture knows."""
        self._groups = self._all_groups()
        self._sizes = [(id(group), len(group[_PARAMETERS])) for group in self._groups]
        self._parameters = [parameter for group in self._groups for parameter in group[_PARAMETERS]]
        self._failed = self._failed or not all(_can_be_captured(one, self._device) for one in self._optimizers)
        self._capture, self._steps = None, 0

    def _set_rates(self) -> None:
        for place, group in enumerate(self._groups):
            rate = float(group[_LR])
            if rate != self._rates[place]:
                self._rate_tensors[place].fill_(min(rate, _LARGEST))
                self._rates[place] = rate

    def _captured(self) -> Capture:
        self._note_settings()
        with self._as_captured():
            branches = [Branch(optimizer.step) for optimizer in self._optimizers]
            return captured(branches, nothing, self._device)

    def _note_settings(self) -> None:
        self._settings = [
            {name: value for name, value in group.items() if name not in (_PARAMETERS, _LR)} for group in self._groups
        ]
        self._kept = [(len(one.state), _first_state(one)) for one in self._optimizers]
        self._rates = [float(group[_LR]) for group in self._groups]
        self._rate_tensors = [torch.tensor(rate, device=self._device) for rate in self._rates]

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        if self._device.type != "cuda":  # what runs again there reads the settings anew
            yield
            return
        before = [dict(group) for group in self._groups]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if type(optimizer) is not SGD:
                    _move_steps(optimizer, group, self._device)
                    group["capturable"] = True
                group["fused"], group["foreach"] = True, False
        self._states = [list(state.items()) for one in self._optimizers for state in one.state.values()]
        for group, rate in zip(self._groups, self._rate_tensors, strict=True):
            group[_LR] = rate
        try:
            yield
        finally:
            for group, settings in zip(self._groups, before, strict=True):
                group.update(settings)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dictionary with its counters where optimizers that are not captured have them."""
    moved = {
        number: {
            name: value.cpu() if name == _STEP and isinstance(value, Tensor) else value for name, value in of.items()
        }
        for group in state["param_groups"]
        if not group.get("fused") and not group.get("capturable")
        for number in group[_PARAMETERS]
        if (of := state["state"].get(number))
    }
    return {**state, "state": {**state["state"], **moved}}


def _can_be_captured(optimizer: Optimizer, device: torch.device) -> bool:
    if type(optimizer) not in _KNOWN or any(getattr(optimizer, hooks, None) for hooks in _HOOKS):
        return False
    return all(
        isinstance(group[_LR], float | int)
        and not group.get("differentiable")
        and all(_is_captured_exactly(one, device) for one in group[_PARAMETERS])
        for group in optimizer.param_groups
    )


def _is_captured_exactly(parameter: Tensor, device: torch.device) -> bool:
    if not parameter.is_floating_point() or parameter.device.type != device.type:
        return False
    return device.type != "cuda" or parameter.dtype != torch.float64


def _first_state(optimizer: Optimizer) -> Any:
    """What it keeps of the first parameter that it keeps something of."""
    return next(iter(optimizer.state.values()), None)


def _move_steps(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
    for parameter in group[_PARAMETERS]:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get(_STEP), Tensor) and state[_STEP].device != device:
            state[_STEP] = state[_STEP].to(device=device, dtype=torch.float32)
