"""What a step sets after a value was read, when other ranks have left it. Pipe -> *this*.

    loss.item()            stage 0 leaves: it has nothing left to do, and cannot know the number
    self.weight += 0.1     so its weight stays as it was, and the next batch would begin with two of them

Replicas that have other batches leave too. What is kept of the read itself (`self.last_loss = loss.item()`), or put
into a list, is a result, which the last stage has, as all others, and which the other ranks are told before hooks; and
so is a buffer of a later stage, as long as no step computes with it.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import is_not
from typing import Any

from torch import nn

from pl_pipe.errors import StageError
from pl_pipe.profiling.preserve import contents_of
from pl_pipe.tensors.ghosts import home_of, value_of

_PLAIN = (bool, int, float, str)
_UNSET = object()


class AfterRead:
    """What all ranks have alike, as it stands when the first of them leaves."""

    def __init__(self, modules: Iterable[nn.Module], settings: Callable[[], Mapping[str, Any]]) -> None:
        """
        Args:
            modules: those whose Python all ranks run.
            settings: reads by name what a step may set besides their attributes.
        """
        self._modules, self._read_settings = list(modules), settings
        self._line: str | None = None
        self._plain: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        self._settings: Mapping[str, Any] = {}
        self._held: list[list[tuple[Any, Any]]] = []

    def note(self, line: str) -> None:
        """`line` reads a value, at which others leave."""
        if self._line is None:
            self._line, self._settings = line, self._read_settings()
            self._plain = [_plain(module) for module in self._modules]
            self._buffers = [dict(module._buffers) for module in self._modules]
            self._held = [contents_of(module, stores=False) for module in self._modules]

    def results(self) -> set[tuple[nn.Module, str]]:
        """The attributes that have been set or filled since, in an evaluation, which hands on nothing to the next."""
        if self._line is None:
            return set()
        found = {
            (module, name)
            for module, plain in zip(self._modules, self._plain, strict=True)
            for name, value in _plain(module).items()
            if value != plain.get(name, _UNSET)
        }
        for module, held in zip(self._modules, self._held, strict=True):
            found.update((module, name) for name in _filled(module, held))
        return found

    def check(self, read: Iterable[Any], *, up_to: int) -> set[tuple[nn.Module, str]]:
        """Refuses, at the step's end, what was set since; but for what was `read` itself, of stages until `up_to`.

        Returns the attributes that hold such results.
        """
        if self._line is None:
            return set()
        known = set(read)
        results: set[tuple[nn.Module, str]] = set()
        for module, plain, buffers in zip(self._modules, self._plain, self._buffers, strict=True):
            for name, value in _plain(module).items():
                is_same = value == plain.get(name, _UNSET) or value != value  # a NaN is nobody's count
                if not is_same and value not in known:
                    raise self._refusal(f"{name} of {type(module).__name__} is set")
                if not is_same:
                    results.add((module, name))
            self._check_buffers(module, buffers, up_to)
        for name, value in self._read_settings().items():
            if value != self._settings.get(name, _UNSET):
                raise self._refusal(f"{name} is set")
        for module, held in zip(self._modules, self._held, strict=True):
            results.update((module, name) for name in _filled(module, held))
        return results

    def _check_buffers(self, module: nn.Module, before: Mapping[str, Any], up_to: int) -> None:
        for name, buffer in module._buffers.items():
            old = before.get(name)
            if buffer is None or buffer is old:
                continue
            value, old_value = value_of(buffer), None if old is None else value_of(old)
            if value is None or value.home < up_to:
                raise self._refusal(f"buffer {name} of {type(module).__name__} is assigned")
            if old is None or home_of(old) != value.home or (old_value is not None and old_value.unseen):
                value.unseen = self._line

    def _refusal(self, what: str) -> StageError:
        return StageError(
            f"{what} after {self._line} has read a value, when other ranks (of earlier stages, or replicas with other "
            f"batches) have left the step and keep the old one; set it in on_train_batch_end, or set schedule=1f1b, "
            f"num_microbatches=1 and plan=straight, with which no rank leaves"
        )


def _filled(module: nn.Module, before: list[tuple[Any, Any]]) -> Iterable[str]:
    """Attributes with containers in which there is something else than before."""
    known = {id(container): items for container, items in before}
    for name in list(vars(module)):
        for container, items in contents_of(module, stores=False, only=name):
            old = known.get(id(container))
            if old is None or len(old) != len(items) or any(map(is_not, _sequence(old), _sequence(items))):
                yield name
                break


def _sequence(items: Any) -> Iterable[Any]:
    return items.values() if isinstance(items, dict) else items


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
