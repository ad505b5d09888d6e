"""Adds up the gradients of a stage's replicas while backward still runs. executor -> *averaging* -> Summing.

Gradients go into buckets in the reverse order of the parameters, which is about the order of backward. A bucket leaves
as soon as its last gradient is there and all earlier buckets have left, so that replicas start their sums alike:

    backward    g9 g8 g7 │ g6 g5 g4 │ g3 g2 g1
    sums                 └── bucket 0 ──►
                                    └── bucket 1 ──►   …   and at the end: who had a gradient, of how many mini-batches
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pl_pipe.comm import Pending, Summing
from pl_pipe.errors import StageError

MOST_BYTES, LEAST_BYTES = 25 << 20, 1 << 20
"""Of a bucket: as much as torch's DistributedDataParallel sends at a time, and at first, so that the link has something
to do early."""
_BUCKETS = 4
"""For stages with few parameters: one bucket would leave when backward is over, and nothing would be hidden. More would
cost more than they hide: every sum has several messages that wait for each other."""


@dataclass
class _Bucket:
    names: tuple[str, ...]
    flat: Tensor | None = None
    sum: Pending | None = None


class GradientAveraging:
    """One replica's part. All replicas must finish the same updates in the same order."""

    def __init__(self, summing: Summing, *, bucket_bytes: int | None = None) -> None:
        self._summing = summing
        self._bucket_bytes = bucket_bytes
        self._sources: Mapping[str, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._gradients: Mapping[str, Tensor] | None = None
        """When backward is over; before, the sources have them."""
        self._waiting: set[str] = set()
        self._hooks: list[Any] = []

    def watch(self, leaves: Mapping[str, Tensor]) -> None:
        """The backward that completes this replica's gradients begins; they gather in `leaves`."""
        self._begin({name: leaf for name, leaf in leaves.items() if leaf.requires_grad})
        for name, leaf in self._sources.items():
            hook = leaf.register_post_accumulate_grad_hook(partial(self._came, name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def finish(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, mini_batches: int, averaged: int
    ) -> dict[str, Tensor]:
        """The gradients of all replicas' `mini_batches` together, divided by their number, at most by `averaged`.

        `gradients` are this replica's; a parameter that got none on any replica is absent from the result.
        """
        if not self._buckets:
            self._begin(parameters)
        for hook in self._hooks:
            hook.remove()
        self._gradients = gradients
        self._waiting.clear()
        self._send_ready()
        had = [float(name in gradients) for name in self._sources]
        counts = torch.tensor([*had, float(mini_batches)], dtype=torch.float64, device=self._device())
        self._summing.start(counts).wait()
        total = dict(self._parts())
        members = min(averaged, int(counts[-1]))
        present = [name for name, count in zip(self._sources, counts.tolist(), strict=False) if count]
        self._sources, self._gradients, self._buckets, self._hooks = {}, None, [], []
        return {name: total[name] if members <= 1 else total[name].div_(members) for name in present}

    def _begin(self, sources: Mapping[str, Tensor]) -> None:
        self._sources = dict(sources)
        total_bytes = sum(tensor.nbytes for tensor in self._sources.values())
        others_bytes = self._bucket_bytes or min(max(total_bytes // _BUCKETS, LEAST_BYTES), MOST_BYTES)
        first_bytes = self._bucket_bytes or LEAST_BYTES
        self._buckets = [_Bucket(names) for names in _divided(self._sources, first_bytes, others_bytes)]
        self._waiting = set(self._sources)

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in self._sources.values()), torch.device("cpu"))

    def _came(self, name: str, _tensor: Tensor) -> None:
        if name not in self._waiting:
            raise StageError(
                f"{name} got a gradient a second time in one backward, when the first was already on its way to the "
                f"other replicas of the stage (a reentrant checkpoint?); use checkpoint(..., use_reentrant=False)"
            )
        self._waiting.discard(name)
        self._send_ready()

    def _send_ready(self) -> None:
        for bucket in self._buckets:
            if bucket.sum is not None:
                continue
            if not self._waiting.isdisjoint(bucket.names):
                return
            bucket.flat = torch.cat([self._flat_gradient(name) for name in bucket.names])
            bucket.sum = self._summing.start(bucket.flat)

    def _flat_gradient(self, name: str) -> Tensor:
        source = self._sources[name]
        gradient = source.grad if self._gradients is None else self._gradients.get(name)
        return torch.zeros_like(source).reshape(-1) if gradient is None else gradient.reshape(-1)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            assert bucket.sum is not None
            assert bucket.flat is not None
            bucket.sum.wait()
            sources = [self._sources[name] for name in bucket.names]
            parts = torch.split(bucket.flat, [tensor.numel() for tensor in sources])
            for name, tensor, part in zip(bucket.names, sources, parts, strict=True):
                yield name, part.view(tensor.shape)


def _divided(sources: Mapping[str, Tensor], first_bytes: int, others_bytes: int) -> Iterator[tuple[str, ...]]:
    """Names in the reverse order, as many as fit; tensors of one bucket have one type and place."""
    names: list[str] = []
    kind, size, most_bytes = None, 0, first_bytes
    for name, tensor in reversed(list(sources.items())):
        if names and (size + tensor.nbytes > most_bytes or (tensor.dtype, tensor.device) != kind):
            yield tuple(names)
            names, size, most_bytes = [], 0, others_bytes
        names.append(name)
        kind = (tensor.dtype, tensor.device)
        size += tensor.nbytes
    if names:
        yield tuple(names)
