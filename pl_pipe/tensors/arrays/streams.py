"""Where the variants' random numbers come from.

*One stream*: the process's generator fills the whole array; masks differ between variants, and depend on how many there
are. Quick: one call draws for all. *Own streams*: each variant draws from a generator state of its own, in the order in
which it would alone; so it gets the numbers of a separate run, whoever else is in the array.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

_ANYWHERE = nullcontext()


class Streams(Protocol):
    own: bool
    """Whether each variant draws in a turn of its own."""

    def turn(self, variant: int) -> AbstractContextManager[None]:
        """Draws within the block are the variant's."""

    def keep(self, variants: Sequence[int]) -> None: ...


class OneStream:
    own = False

    def turn(self, variant: int) -> AbstractContextManager[None]:  # noqa: ARG002
        return _ANYWHERE

    def keep(self, variants: Sequence[int]) -> None: ...


class OwnStreams:
    """One generator state a variant: what `torch.get_rng_state()` gave after its model was built."""

    own = True

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = [[state.clone()] for state in states]

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> "OwnStreams":
        """Streams as they stand after `torch.manual_seed(seed)`."""
        return cls([torch.Generator().manual_seed(seed).get_state() for seed in seeds])

    @contextmanager
    def turn(self, variant: int) -> Iterator[None]:
        before = _current()
        try:
            _set(self._states[variant])
            yield
            self._states[variant] = _current()
        finally:
            _set(before)

    def keep(self, variants: Sequence[int]) -> None:
        self._states = [self._states[variant] for variant in variants]

    def __len__(self) -> int:
        return len(self._states)

    @property
    def states(self) -> list[list[Tensor]]:
        """To be saved, and put back, with a checkpoint: the CPU's state, and the GPU's where one is in use."""
        return [list(states) for states in self._states]

    @states.setter
    def states(self, states: Sequence[Sequence[Tensor]]) -> None:
        self._states = [list(of_one) for of_one in states]


class FollowedStreams(OwnStreams):
    """Some variants draw from the process's generator, as in a run of their own, where it also serves the data loader.

    Where the process has drawn since their last step, they all start where it stands; it goes on where the first of
    them ended.
    """

    def __init__(self, states: Sequence[Tensor], follows: Sequence[bool]) -> None:
        super().__init__(states)
        self._follows = list(follows)
        self.left: list[Tensor] | None = None
        """Where the process stood after the last step; to be saved with the states."""

    @property
    def all_follow(self) -> bool:
        return all(self._follows)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Around a step of all variants."""
        followers = [variant for variant, follows in enumerate(self._follows) if follows]
        now = _current() if followers else []
        if self.left is None or not all(map(torch.equal, now, self.left)):
            for variant in followers:
                self._states[variant] = now
        yield
        if followers:
            self.left = self._states[followers[0]]
            _set(self.left)

    def keep(self, variants: Sequence[int]) -> None:
        super().keep(variants)
        self._follows = [self._follows[variant] for variant in variants]


def _current() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _set(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1])
        else:  # the first draw on the GPU: follow the CPU's state
            torch.cuda.manual_seed(int(states[0][:8].view(torch.int64).item()))
