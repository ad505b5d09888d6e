"""Steps of several variants as one CUDA graph, each on a stream of its own. branches -> *capture* -> replays.

    main      ─ once ─┬───────────────┬─ values put together ─┬──►
    streams           ├─ variant 0 ───┼────── update ─────────┤
                      └─ variant 1 ───┴────── update ─────────┘

    main      ────────┬───────────────┬─ values put together ─┬──►
    streams           └─ the array ───┼────── update 0 ───────┤
                                      └────── update 1 ───────┘   on a stream of its own, as those of further variants

Where there is no CUDA, the branches run again one after another; what is computed is the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class Branch:
    """What is computed on a stream of its own."""

    run: Callable[[], None]
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around it: random numbers are those of its variant."""
    is_random: bool = False
    updates: Sequence[Callable[[], None]] = ()
    """What follows, side by side, the first on the branch's own stream; `finish` need not wait for it."""


class Capture(Protocol):
    def replay(self) -> None: ...

    def device_s(self) -> float | None:
        """How long the device took for the last replay, once it has ended; None where that is not known."""


def nothing() -> None: ...


def captured(
    branches: Sequence[Branch],
    finish: Callable[[], None],
    device: torch.device,
    *,
    once: Callable[[], None] = nothing,
    is_timed: bool = False,
) -> Capture:
    """`once`, the branches, and then `finish`, to be run again and again; nothing is computed before the first
    replay."""
    if device.type != "cuda":
        return _Again(branches, finish, once)
    return _Graph(branches, finish, device, once, is_timed=is_timed)


def warm_up(branches: Sequence[Branch], device: torch.device, *, once: Callable[[], None] = nothing) -> None:
    """Before a capture on a GPU: kernels are loaded and chosen on streams like those that will be captured."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        once()
        for branch in branches:
            with branch.turn():
                branch.run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


class _Again:
    def __init__(self, branches: Sequence[Branch], finish: Callable[[], None], once: Callable[[], None]) -> None:
        self._branches = list(branches)
        self._finish, self._once = finish, once

    def replay(self) -> None:
        self._once()
        for branch in self._branches:
            with branch.turn():
                branch.run()
                for update in branch.updates:
                    update()
        self._finish()

    def device_s(self) -> float | None:
        return None


class _Graph:
    def __init__(
        self,
        branches: Sequence[Branch],
        finish: Callable[[], None],
        device: torch.device,
        once: Callable[[], None],
        *,
        is_timed: bool,
    ) -> None:
        self._device = device
        self._marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_timed else []  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        self._random = [(branch, torch.Generator(device)) for branch in branches if branch.is_random]
        generators = {id(branch): generator for branch, generator in self._random}
        for _, generator in self._random:
            self._graph.register_generator_state(generator)
        streams: list[Any] = []
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            main: Any = torch.cuda.current_stream(device)
            once()
            begin, computed = main.record_event(), []
            for branch in branches:
                own = _stream_after(begin, main)
                with torch.cuda.stream(own), self._drawing_from(generators.get(id(branch))):
                    branch.run()
                    computed.append(own.record_event())
                updating = [own, *(_stream_after(computed[-1], main) for _ in branch.updates[1:])]
                for stream, update in zip(updating, branch.updates, strict=False):
                    with torch.cuda.stream(stream):
                        update()
                streams += updating
            for event in computed:
                main.wait_event(event)
            finish()
            for stream in streams:
                main.wait_stream(stream)
        self._streams = streams  # blocks of the graph's memory belong to them

    def replay(self) -> None:
        for branch, generator in self._random:
            with branch.turn():
                generator.set_state(torch.cuda.get_rng_state(self._device))
        stream = torch.cuda.current_stream(self._device)
        for mark in self._marks[:1]:
            mark.record(stream)
        self._graph.replay()
        for mark in self._marks[1:]:
            mark.record(stream)
        for branch, generator in self._random:
            with branch.turn():
                torch.cuda.set_rng_state(generator.get_state(), self._device)

    def device_s(self) -> float | None:
        if not self._marks:
            return None
        began, ended = self._marks
        return float(began.elapsed_time(ended)) / 1e3

    @contextmanager
    def _drawing_from(self, generator: torch.Generator | None) -> Iterator[None]:
        """Operations draw from the device's generator; while a branch is captured, that is the branch's own."""
        if generator is None:
            yield
            return
        default = torch.cuda.default_generators[self._device.index or 0]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)


def _stream_after(event: Any, main: Any) -> Any:
    """torch hands out the same 32 streams again and again: what is not to wait must not be given the main one."""
    while (stream := _stream(main.device)) == main:
        pass
    stream.wait_event(event)
    return stream


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
