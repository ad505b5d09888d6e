"""Times all layers of a step once, as its device needs it: one pass on a CPU, two on a CUDA device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pl_pipe.errors import ProfileError
from pl_pipe.profiling.clocks import Clock, CudaClock
from pl_pipe.profiling.passes import Passes, Signature
from pl_pipe.profiling.timers import Holds, LayerTimer, TimingCost, device_cost, host_cost

_ATTEMPTS = 4


@dataclass(frozen=True)
class LayerTimes:
    """Of each layer, in execution order."""

    forward_s: list[float]
    backward_s: list[float]


class Stopwatch(Protocol):
    def time_layers(self) -> LayerTimes: ...


def stopwatch_for(passes: Passes, signature: Signature) -> Stopwatch:
    return (_CudaStopwatch if passes.device.type == "cuda" else _HostStopwatch)(passes, signature)


class _HostStopwatch:
    """On a CPU the host's time is the layer's."""

    def __init__(self, passes: Passes, signature: Signature) -> None:
        self._passes, self._signature = passes, signature
        self._cost = host_cost(passes.clock, passes.device)

    def time_layers(self) -> LayerTimes:
        timer = _matching_pass(self._passes, self._signature, self._passes.clock)
        return _times(timer, self._signature, self._cost)


class _CudaStopwatch:
    """A pass by the host's clock, then one by the device's, which is held so that it never waits for the host."""

    def __init__(self, passes: Passes, signature: Signature) -> None:
        self._passes, self._signature = passes, signature
        self._clock = CudaClock(passes.device)
        self._host_cost = host_cost(passes.clock, passes.device)
        self._device_cost = device_cost(self._clock)

    def time_layers(self) -> LayerTimes:
        by_host = _matching_pass(self._passes, self._signature, self._passes.clock)
        by_device = _matching_pass(self._passes, self._signature, self._clock, by_host.holds())
        host = _times(by_host, self._signature, self._host_cost)
        device = _times(by_device, self._signature, self._device_cost)
        self._clock.recycle()
        added_s = overlapped(
            [*host.forward_s, *reversed(host.backward_s)], [*device.forward_s, *reversed(device.backward_s)]
        )
        layers = len(self._signature)
        return LayerTimes(forward_s=added_s[:layers], backward_s=added_s[layers:][::-1])


def overlapped(host_s: Sequence[float], device_s: Sequence[float]) -> list[float]:
    """How much later the device is done because of each layer, when the host runs ahead of it and fills its queue.

    host    ├─ a ─┤├─ b ─┤├─ c ─┤              layers that are long on the device take the device's time,
    device     ├──── a ────┤├─ b ─┤·├─ c ─┤    layers that the host cannot prepare fast enough take the host's
    """
    added_s, issued_s, done_s = [], 0.0, 0.0
    for host, device in zip(host_s, device_s, strict=True):
        issued_s += host
        finished_s = max(done_s + device, issued_s)
        added_s.append(finished_s - done_s)
        done_s = finished_s
    return added_s


def _times(timer: LayerTimer, signature: Signature, cost: TimingCost) -> LayerTimes:
    return LayerTimes(*timer.times(len(signature), cost))


def _matching_pass(passes: Passes, signature: Signature, clock: Clock, holds: Holds | None = None) -> LayerTimer:
    """The timer of a pass that ran the recorded layers."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            passes.start_over()
        timer = LayerTimer(clock, holds)
        found = passes.timed(timer)
        if found == signature:
            return timer
    length = min(len(found), len(signature))
    place = next((index for index in range(length) if found[index] != signature[index]), length)
    raise ProfileError(
        f"the step runs other layers from one pass to the next, though it starts from the same random numbers: "
        f"layer {place} was {_named(signature, place)} and then {_named(found, place)}; fix the choice for the profile"
    )


def _named(signature: Signature, place: int) -> str:
    if place >= len(signature):
        return "nothing"
    module, description = signature[place]
    return f"{module} {description}".strip()
