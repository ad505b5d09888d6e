"""Tells ranks that load no data what each batch looks like. a loader's rank -> *OutlineChannel* -> stand-ins.

A batch's outline is all of it but the numbers in its tensors, as bytes. Outlines repeat: each is sent once under a
number, and afterwards the number alone, so that a batch costs its receiver one message of four numbers.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.outbox import Outbox
from pl_pipe.comm.waiting import Wait, read_as, wait_for

_END = -1
_NUMBERS = 64  # outlines remembered; those of batches with texts in them differ every time
_KEPT = 64  # messages; no receiver is as far behind

Place = tuple[int, int]
"""The how-manieth iteration of any loader, and the how-manieth batch in it."""


class OutlineChannel:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(self, source: int, targets: Sequence[int], *, timeout_s: float) -> None:
        self._source = source
        self._targets = list(targets)
        self._timeout_s = timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._outbox = Outbox(timeout_s=timeout_s)
        self._sent = 0
        self._numbers: dict[bytes, int] = {}
        self._outlines: dict[int, bytes] = {}
        self._ahead: dict[Place, bytes | None] = {}
        """What came before it was asked for."""

    def tell(self, place: Place, outline: bytes | None) -> None:
        """By the source, without waiting: the outline of a batch, or None where the iteration has ended."""
        number, content = _END, b""
        if outline is not None:
            number, content = self._number(outline)
        parts = [torch.tensor([*place, number, len(content)])]
        if content:
            parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for target in self._targets:
            for part in parts:
                self._outbox.add(self._sent, dist.isend(part, target, group=self._group), part, target)
        self._sent += 1
        self._outbox.settle(before=self._sent - _KEPT)

    def hear(self, place: Place) -> bytes | None:
        """By a target: waits for the outline of a batch; None where the iteration has ended."""
        while place not in self._ahead:
            came, outline = self._next()
            self._ahead[came] = outline
        return self._ahead.pop(place)

    def forget(self, iteration: int) -> None:
        """By a target, which has left the iteration: what it did not ask for will not be asked for."""
        self._ahead = {place: outline for place, outline in self._ahead.items() if place[0] != iteration}

    def close(self) -> None:
        """Gives the process group back; what is under way is lost."""
        self._outbox.clear()
        dist.destroy_process_group(self._group)
        self._group = None

    def _number(self, outline: bytes) -> tuple[int, bytes]:
        """The outline's number, and its content if that is still to be told."""
        if outline in self._numbers:
            return self._numbers[outline], b""
        if len(self._numbers) == _NUMBERS:
            self._numbers.clear()
        number = self._numbers[outline] = len(self._numbers)
        return number, outline

    def _next(self) -> tuple[Place, bytes | None]:
        header = self._received(torch.zeros(4, dtype=torch.int64))
        iteration, index, number, size = (int(entry) for entry in header)
        if size:
            self._outlines[number] = self._received(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()
        return (iteration, index), None if number == _END else self._outlines[number]

    def _received(self, buffer: Tensor) -> Tensor:
        def outlines() -> Wait:
            who = f"rank {dist.get_rank()}, which loads no data,"
            return Wait(who, f"a batch that rank {self._source} loads", [self._source], ", or raise timeout_s")

        with read_as(outlines, timeout_s=self._timeout_s):
            work = dist.irecv(buffer, self._source, group=self._group)
        wait_for(work, outlines, timeout_s=self._timeout_s)
        return buffer
