"""The weights of one stage after 0, 1, 2 … updates, as long as mini-batches need them. executor -> *versions* -> Pipe.

A mini-batch's forward and backward must see the same weights, though others' updates come between them. Weights are
not copied for that: before an update the parameters move on to fresh memory, and what is in flight keeps the old.

    version 3   memory a   ◄── batch 5 in flight
    version 4   memory b   ◄── batch 6 in flight
    version 5   memory c   ◄── the parameters: the optimizer writes here, after they have left b
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pl_pipe.errors import StageError


class WeightVersions:
    """Versions of the trainable ones among `parameters`; what is frozen has only one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.newest = 0
        self.peak = 1
        """The most versions ever kept at a time."""
        self._parameters = dict(parameters)
        self._older: dict[int, dict[str, Tensor]] = {}

    @property
    def kept(self) -> int:
        return len(self._older) + 1

    def leaves(self, version: int) -> dict[str, Tensor]:
        """New leaf tensors that show the weights of `version`; the gradients of one update gather in them."""
        if version == self.newest:
            # Through `.data`: an alias by detach() would share the counter by which autograd notices the optimizer.
            weights = {name: p.data for name, p in self._parameters.items() if p.requires_grad}
        elif version in self._older:
            weights = {name: tensor.data for name, tensor in self._older[version].items()}
        else:
            raise StageError(f"weight version {version} is not kept; the newest is {self.newest}")
        return {name: tensor.requires_grad_() for name, tensor in weights.items()}

    def begin_next(self, still_needed: Iterable[int]) -> None:
        """To be called before the optimizer writes. Versions go that are not `still_needed`; so no more than those and
        the new one ever exist at a time."""
        needed = set(still_needed)
        self._older = {version: weights for version, weights in self._older.items() if version in needed}
        if self.newest in needed:
            kept = self._older[self.newest] = {}
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    if parameter.requires_grad:
                        kept[name] = parameter.data
                        parameter.data = parameter.data.clone()
        self.newest += 1
        self.peak = max(self.peak, self.kept)
