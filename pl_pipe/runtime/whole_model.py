"""A pipeline of one stage: steps without ghosts or messages, behind the interface of a Pipe."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class WholeStep:
    """A mini-batch between its forward and its backward."""

    left = False
    seed = None  # nobody else draws
    out_of_turn = is_repetition = False

    def bring(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def of_last(self, call: Callable[[], Any], names: Any = None) -> Any:  # noqa: ARG002 - the call gives them
        return call()

    def at_last(self, tensor: Tensor) -> Tensor:
        return tensor

    def forget(self, run: Callable[[Any], Tensor | None]) -> bool:  # noqa: ARG002 - its backward follows at once
        return False

    def backward(self, loss: Tensor | None = None) -> None:
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]


class WholeModel:
    """All layers are here."""

    @contextmanager
    def step(
        self,
        number: int,  # noqa: ARG002 - nobody has to agree on it
        batch: Any = None,  # noqa: ARG002
        *,
        parameters: Mapping[str, Tensor] | None = None,
        out_of_turn: bool = False,
    ) -> Iterator[WholeStep]:
        assert parameters is None, "one stage keeps no older weights"
        assert not out_of_turn, "there is nobody else to take a turn"
        yield WholeStep()
