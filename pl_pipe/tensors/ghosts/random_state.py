"""Random numbers that no stage owns: all ranks must draw the same, whatever their own layers drew."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()  # ranks may be threads that share one generator


class CommonRandom:
    """A stream of random numbers that starts alike on every rank, in every step."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._states: list[Tensor] | None = None

    def same_everywhere(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with _lock:
            own = self._current()
            try:
                if self._states is None:
                    self._seed_generators()
                else:
                    self._set(self._states)
                out = function(*args, **kwargs)
                self._states = self._current()
                return out
            finally:
                self._set(own)

    def without_a_trace(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """For shapes only: another stage draws the numbers, from its own stream."""
        with _lock:
            own = self._current()
            try:
                return function(*args, **kwargs)
            finally:
                self._set(own)

    def _seed_generators(self) -> None:
        """`torch.manual_seed` without its visit to every accelerator, which costs a millisecond."""
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(self._seed)

    def _current(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)
