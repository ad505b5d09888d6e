"""Which layers a tensor's value comes from, through views, in-place changes and functions nobody saw.

    h = a(x)              h: made by a
    v = h[:, :2]          v: made by __getitem__, on the same storage
    v.mul_(3)             the storage is written by mul_: v and h both come from mul_ now
    b(h)                  edge mul_ -> b

A tensor remembers its *maker*, a storage its last *writer*; of the two the later one holds. Tensors are keyed weakly,
so that recording keeps no activation alive, and nothing is written onto them.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

_KEY = "pl_pipe.layer"


class Lineage:
    """Layers are numbers in execution order; 0 is the step's input, which makes nothing."""

    def __init__(self) -> None:
        self._makers = WeakTensorKeyDictionary()
        self._writers: dict[int, tuple[int, object]] = {}
        self._ancestors: list[int] = [0]  # one bit a layer
        self._token = object()

    def add_layer(self, sources: Iterable[int]) -> int:
        """The number of a new layer that takes the outputs of `sources`."""
        ancestors = 0
        for source in sources:
            ancestors |= self._ancestors[source] | 1 << source
        self._ancestors.append(ancestors)
        return len(self._ancestors) - 1

    def sources(self, tensor: Tensor) -> frozenset[int]:
        """The layers that the tensor's present value comes from; none for batch tensors and constants."""
        tensor = _unwrapped(tensor)
        makers: frozenset[int] | None = self._makers.get(tensor)  # type: ignore[no-untyped-call]
        if makers is None:
            makers = self._makers_by_autograd(tensor)
        if not self._writers:
            return makers
        writer, _ = self._writers.get(storage_key(tensor), (0, None))
        if writer <= max(makers, default=0):
            return makers
        before_writer = self._ancestors[writer]
        return frozenset({writer, *(maker for maker in makers if not before_writer >> maker & 1)})

    def made(self, tensor: Tensor, layer: int) -> None:
        self._makers[_unwrapped(tensor)] = frozenset((layer,))

    def written(self, tensor: Tensor, layer: int) -> None:
        """`layer` changed the tensor in place, and with it all that share its storage."""
        self._writers[storage_key(tensor)] = layer, storage_reserved(tensor)

    def own(self, tensor: Tensor, layer: int) -> Node | None:
        """Gives the tensor's autograd node to the layer that made it; None if it has none or another made it before."""
        node = _unwrapped(tensor).grad_fn
        if node is None or self._owner(node) is not None:
            return None
        _notes(node)[_KEY] = self._token, layer
        return node

    def _owner(self, node: Node) -> int | None:
        token, layer = _notes(node).get(_KEY, (None, None))
        return layer if token is self._token else None

    def _makers_by_autograd(self, tensor: Tensor) -> frozenset[int]:
        """A tensor out of a function that no mode sees (scripted, or an extension's): its graph leads to its makers."""
        makers: set[int] = set()
        if tensor.grad_fn is not None:
            pending, seen = [tensor.grad_fn], {tensor.grad_fn}
            while pending:
                node = pending.pop()
                owner = self._owner(node)
                if owner is not None:
                    makers.add(owner)
                    continue
                following = {parent for parent, _ in node.next_functions if parent is not None} - seen
                seen |= following
                pending += following
            self._makers[tensor] = frozenset(makers)
        return frozenset(makers)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Inside `torch.vmap` and its kin a tensor is a wrapper that dies with it; what it wraps goes on."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _notes(node: Node) -> dict[str, Any]:
    notes: Any = node.metadata  # a dictionary, whatever torch's annotation says
    return cast(dict[str, Any], notes)


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors that share memory; unique while one of them lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # sparse and the like have no storage of their own


def storage_reserved(tensor: Tensor) -> object:
    """Holds the address, not the memory: while it lives, no other memory has the tensor's `storage_key`."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return tensor


def is_strided(tensor: Tensor) -> bool:
    """Whether its numbers lie in one memory, at strides: not those of sparse and nested tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def root_of_view(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
