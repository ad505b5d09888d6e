"""What a graph's operations do to memory and random numbers. graph -> *facts* -> what is shared, what is refused."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_PROBABILITIES = ("dropout_p", "dropout")
"""Of attention and recurrent layers, which with zero draw nothing; what has a `p` takes its numbers all the same."""
_UNSAID = frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten._unsafe_view, torch.ops.aten.unsafe_split, torch.ops.aten.unsafe_split_with_sizes)
    for overload in packet.overloads()  # type: ignore[no-untyped-call]
)
"""Views that do not say so; by the first, a reshape ends."""
_TORCHS = ("aten", "prims")


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    if operation is torch.ops.aten.native_dropout.default:
        return node.args[2] is not False and _size(node.args[0]) != 0
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in _PROBABILITIES:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True


def _size(node: Any) -> int | None:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else None


def is_convolution(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and "convolution" in str(node.target)


def is_torchs(operation: Any) -> bool:
    """Whether an operation is known to say what it writes to and whether it draws; a user's own need not."""
    if isinstance(operation, torch._ops.OpOverload):
        return operation.namespace in _TORCHS
    return operation is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether the result may be memory of an argument: it costs nothing, and who writes to it writes to that."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return operation is operator.getitem
    return operation in _UNSAID or any(one.alias_info is not None for one in operation._schema.returns)


def written_to(graph: fx.GraphModule) -> set[fx.Node]:
    """All whose memory an operation writes to, also through views."""
    left = [written for node in graph.graph.nodes for written in _writes(node)]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes if is_view(node) else []
    return found


def _writes(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operation writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given: Any = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        yield from (one for one in tree_leaves(given) if isinstance(one, fx.Node))
