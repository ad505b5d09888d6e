"""Numbers that replayed steps say, saved before the next replay overwrites them. the graph's memory -> *copies*."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_pipe.strategies.fusion.replayed_inputs import copy_at_once


class ReplayedValues:
    """Values of one kind lie in one tensor, so that one copy saves them all."""

    def __init__(self) -> None:
        self._groups: list[tuple[Tensor, list[tuple[int, int]]]] = []
        """With the variant and the place of each."""
        self._counts: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def group(self, values: Sequence[Sequence[Tensor]]) -> None:
        """Of each variant; part of what is replayed."""
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[int, int, Tensor]]] = {}
        for variant, own in enumerate(values):
            for place, value in enumerate(own):
                alike.setdefault((value.shape, value.dtype, value.device), []).append((variant, place, value))
        self._counts = [len(own) for own in values]
        self._groups = [
            (torch.stack([value for _, _, value in of_kind]), [(variant, place) for variant, place, _ in of_kind])
            for of_kind in alike.values()
        ]

    def copies(self) -> list[list[Tensor]]:
        found = [[torch.empty(0)] * count for count in self._counts]
        kept = [torch.empty_like(together) for together, _ in self._groups]
        copy_at_once([(copy, together) for copy, (together, _) in zip(kept, self._groups, strict=True)])
        for copy, (_, places) in zip(kept, self._groups, strict=True):
            for (variant, place), value in zip(places, copy.unbind(), strict=True):
                found[variant][place] = value
        return found
