"""What was fused, how, and what was not and why. mode and rules -> *report* -> log, profile command."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from pl_pipe.tensors.arrays.mode import PER_VARIANT

_HEADINGS = ("layer", "operation", "how", "calls", "why")
_FORWARDS = ("forward", "_call_impl", "_wrapped_call_impl")
"""Within these a module runs once a variant, if it is to: with its hooks, but not in other methods of its own."""


@dataclass
class Entry:
    """All calls of one operation in one layer that were computed the same way."""

    layer: str
    operation: str
    how: str
    why: str
    calls: int

    @property
    def is_fused(self) -> bool:
        return self.how != PER_VARIANT


class FusionReport:
    """Hears of every fused or unfused operation while arrays run."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.layer = ""
        """The watched module that runs just now."""
        self._names = names
        self._entries: dict[tuple[str, str, str], Entry] = {}

    def note(self, operation: str, how: str, why: str = "") -> None:
        key = self.layer, operation, how
        entry = self._entries.get(key)
        if entry is None:
            layer = self.layer or self._enclosing()
            self._entries[key] = Entry(layer, operation, how, why, 1)
        else:
            entry.calls += 1

    @contextmanager
    def apart(self) -> Iterator["FusionReport"]:
        """What is noted within the block is the other's alone."""
        other = FusionReport(self._names)
        before, self._entries = self._entries, other._entries
        try:
            yield other
        finally:
            self._entries = before

    def part(self) -> str:
        """The innermost module whose forward is running, for messages: it could run once a variant."""
        return self.layer or self._enclosing(_FORWARDS)

    def clear(self) -> None:
        self._entries.clear()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    @property
    def unfused(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.is_fused)

    def how(self, layer: str) -> str:
        """How a layer was computed, by its name; several ways joined by a comma."""
        return ", ".join(dict.fromkeys(entry.how for entry in self.entries if entry.layer == layer))

    def lines(self) -> list[str]:
        rows = [(entry.layer, entry.operation, entry.how, str(entry.calls), entry.why) for entry in self.entries]
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (_HEADINGS, *rows)
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _enclosing(self, functions: Collection[str] = ()) -> str:
        """The innermost module of the model whose Python (or one of whose `functions`) is running; asked only for a
        message or a first note."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            module = frame.f_locals.get("self")
            is_one = not functions or frame.f_code.co_name in functions
            if is_one and isinstance(module, nn.Module) and module in self._names:
                return self._names[module]
            frame = frame.f_back
        return ""
