"""Random numbers that nothing else draws from: loaders, hooks, steps -> *streams* -> torch, numpy, random."""

import random
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from typing_extensions import override


class PythonStream(AbstractContextManager[None]):
    """A state of numpy's global generator and `random`'s: inside `with stream:` it is the process's.

    The stream continues where the last `with` left it.
    """

    def __init__(self, seed: int) -> None:
        seed %= 2**64
        self._python = random.Random(seed).getstate()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)
        self._pending: dict[str, Any] = {**_NO_BITS, "has_gauss": 0, "gauss": 0.0}
        self._depth = 0  # a loader inside a loader may enter the stream it is already in

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._exchange()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._exchange()

    def _exchange(self) -> None:
        """The process's states become the stream's and the other way round; this runs twice a batch, so it is quick."""
        state = random.getstate()
        random.setstate(self._python)
        self._python = state
        # numpy copies a state in 75 us, but changes its global generator in 1 us. That forgets the second normal number
        # of a pair, which the one before it left behind; so the pair's rest is carried over apart.
        bits, pending = mtrand.get_bit_generator(), _pending_normal()
        mtrand.set_bit_generator(self._numpy)
        if self._pending["has_gauss"]:
            _pending_normal(self._pending)
        self._numpy, self._pending = bits, pending


class RandomStream(PythonStream):
    """The same with torch's CPU generator.

    One stream may serve several loaders, provided that every rank iterates all of them in the same order; it can be
    pickled, so that ranks may start from one rank's.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._torch = torch.Generator().manual_seed(seed % 2**64).get_state()

    @classmethod
    def current(cls) -> "RandomStream":
        """Starts as the process's generators stand now: a model that draws nothing then gets a plain run's batches."""
        stream = cls(0)
        stream._torch = torch.default_generator.get_state()
        stream._python = random.getstate()
        state = np.random.get_state(legacy=False)
        stream._numpy = type(mtrand.get_bit_generator())()
        stream._numpy.state = state
        stream._pending = {**_NO_BITS, "has_gauss": state["has_gauss"], "gauss": state["gauss"]}
        return stream

    def become_current(self) -> None:
        """The process's generators go on as this stream; it is not to be used afterwards."""
        self._exchange()

    @override
    def _exchange(self) -> None:
        default = torch.default_generator
        now = default.get_state()
        default.set_state(self._torch)
        self._torch = now
        super()._exchange()


_NO_BITS = {"bit_generator": "none", "state": {}}


def _pending_normal(new: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads, and with `new` replaces, what numpy's global generator keeps besides its bits, leaving the bits alone."""
    rand = mtrand._rand
    bits = rand._bit_generator
    rand._bit_generator = SimpleNamespace(state=dict(_NO_BITS))  # type: ignore[assignment]
    try:
        old = rand.get_state(legacy=False)
        if new is not None:
            rand.set_state(new)
        return old
    finally:
        rand._bit_generator = bits
