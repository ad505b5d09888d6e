"""What a step sets in Python after a value was read, when ranks of earlier stages have left it. Pipe -> *this*.

    loss.item()            stage 0 leaves: it has nothing left to do, and cannot know the number
    self.weight += 0.1     so its weight stays as it was, and the next batch would begin with two of them

What is kept of the read itself (`self.last_loss = loss.item()`) is a result, which the last stage has, as all others.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from pl_pipe.errors import StageError

_PLAIN = (bool, int, float, str)
_UNSET = object()


class AfterRead:
    """The plain attributes of modules whose Python all ranks run, as they stand when the first rank leaves."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._line: str | None = None
        self._before: list[dict[str, Any]] = []

    def note(self, line: str) -> None:
        """`line` reads a value, at which others leave."""
        if self._line is None:
            self._line, self._before = line, [_plain(module) for module in self._modules]

    def check(self, read: Iterable[Any]) -> None:
        """Refuses, at the step's end, what was set since; but for what was `read` itself."""
        if self._line is None:
            return
        known = set(read)
        for module, before in zip(self._modules, self._before, strict=True):
            for name, value in _plain(module).items():
                is_same = value == before.get(name, _UNSET) or value != value  # a NaN is nobody's count
                if not is_same and value not in known:
                    raise StageError(
                        f"{name} of {type(module).__name__} is set after {self._line} has read a value, when ranks of "
                        f"earlier stages have left the step and keep the old one; set it before the read, or keep a "
                        f"tensor (loss.detach()) instead of a number"
                    )


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
