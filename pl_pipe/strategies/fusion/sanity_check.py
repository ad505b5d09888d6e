"""Lightning's check before training draws no numbers of the run: it puts the generators back. Here there are more."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import Tensor
from typing_extensions import override

from pl_pipe.tensors.arrays import FollowedStreams


@contextmanager
def unmoved_by_sanity_check(trainer: Any, streams: FollowedStreams) -> Iterator[None]:
    """Within the block, variants draw after the check as if there had been none."""
    callback = _PutsBack(streams)
    trainer.callbacks.insert(0, callback)
    try:
        yield
    finally:
        trainer.callbacks.remove(callback)


class _PutsBack(L.Callback):
    def __init__(self, streams: FollowedStreams) -> None:
        self._streams = streams
        self._states: list[list[Tensor]] = []
        self._left: list[Tensor] | None = None

    @override
    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._states, self._left = self._streams.states, self._streams.left

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._streams.states, self._streams.left = self._states, self._left
