"""Random numbers of compiled steps are those of any other. traced graph -> *draws that hold still* -> the compiler.

A GPU draws in the order in which a tensor lies in memory, several numbers at once where it lies at a round address; and
operations take their numbers one after another. The compiler may lay tensors out otherwise (columns are padded for a
matrix product, if that was quicker when it was tried) and change the order of operations that do not depend on each
other. So draws become operations that it cannot look into: they know the layout, and each depends on the one before.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay.graph_facts import is_random

_aten = torch.ops.aten
_WHOLE = "random_"
_DROPOUT = _aten.native_dropout.default
_FILLED = {
    _aten.bernoulli_.float: "bernoulli_",
    _aten.uniform_.default: "uniform_",
    _aten.normal_.default: "normal_",
    _aten.exponential_.default: "exponential_",
}
_MADE: dict[Any, tuple[str, Callable[..., Sequence[float]]]] = {
    _aten.rand.default: ("uniform_", lambda *_: (0, 1)),
    _aten.rand_like.default: ("uniform_", lambda *_: (0, 1)),
    _aten.randn.default: ("normal_", lambda *_: (0, 1)),
    _aten.randn_like.default: ("normal_", lambda *_: (0, 1)),
    _aten.bernoulli.p: ("bernoulli_", lambda _, p: (p,)),
    _aten.randint.default: (_WHOLE, lambda high, _: (0, high)),
    _aten.randint.low: (_WHOLE, lambda low, high, _: (low, high)),
}
"""How torch draws them, too: it fills new memory; with which numbers, by the operation's arguments."""
_NOT_THE_COMPILERS = ("attention", "rnn")
"""Operations that it leaves as they are, and that draw for the places of a tensor, however it lies."""
_SHIFT = "pl_pipe_shift"
_ROUND = 16
"""Bytes that are read and written at once, at most."""


def shift_of(tensor: Tensor) -> int:
    """How many of its numbers lie between the last round address and the first of them."""
    return tensor.data_ptr() % _ROUND // tensor.element_size()


def note_shifts(graph: fx.GraphModule, shifts: Sequence[int]) -> None:
    """Of what dropouts were given when the graph was traced, one after another."""
    for node, shift in zip(graph.graph.find_nodes(op="call_function", target=_DROPOUT), shifts, strict=True):
        node.meta[_SHIFT] = shift


def hold_draws(graph: fx.GraphModule) -> None:
    """Changes the graph, a traced one that knows its tensors' layouts."""
    before: fx.Node | None = None
    for node in [node for node in graph.graph.nodes if is_random(node)]:
        with graph.graph.inserting_before(node):
            drawn = _held(graph.graph, node, before)
        if drawn is None:
            _check(node, before)
            before = node
        else:
            node.replace_all_uses_with(drawn)
            graph.graph.erase_node(node)
            before = drawn
    graph.recompile()


def _held(graph: fx.Graph, node: fx.Node, before: fx.Node | None) -> fx.Node | None:
    """The same draw as an operation of ours; None where there is none for it."""
    if node.kwargs.get("generator") is not None:
        return None
    after = None if before is None else _tensor_of(graph, before)
    if node.target is _DROPOUT:
        given, p, trains = node.args
        if trains is False:
            return None
        strides = list(_value(given).stride())
        return graph.call_function(_ops.dropout.default, (given, p, strides, node.meta.get(_SHIFT, 0), after))
    if node.target in _FILLED:
        filled = node.args[0]
        drawn = _filled(graph, _FILLED[node.target], _numbers(node), _value(filled), after)
        return graph.call_function(_aten.copy_.default, (filled, drawn))
    if node.target in _MADE:
        how, numbers = _MADE[node.target]
        return _filled(graph, how, numbers(*node.args), _value(node), after)
    return None


def _filled(graph: fx.Graph, how: str, numbers: Sequence[float], like: Tensor, after: fx.Node | None) -> fx.Node:
    layout = list(like.shape), list(like.stride()), like.dtype, like.device
    return graph.call_function(_ops.filled.default, (*layout, how, [float(one) for one in numbers], after))


def _numbers(node: fx.Node) -> list[float]:
    """The distribution's, after the tensor."""
    arguments = node.target._schema.arguments[1:]  # type: ignore[union-attr]
    given = dict(zip((one.name for one in arguments), node.args[1:], strict=False)) | node.kwargs
    return [float(given.get(one.name, one.default_value)) for one in arguments if one.name != "generator"]


def _check(node: fx.Node, before: fx.Node | None) -> None:
    if not any(kind in str(node.target) for kind in _NOT_THE_COMPILERS):
        raise FusionError(f"the step draws random numbers by {node.target}, and compiled it would draw others")
    if before is not None and not _depends(node, before):
        raise FusionError(
            f"the step draws random numbers by {before.target} and {node.target}, which a compiler may do in another "
            "order"
        )


def _depends(node: fx.Node, before: fx.Node) -> bool:
    left, seen = [node], {node}
    while left:
        for one in left.pop().all_input_nodes:
            if one is before:
                return True
            if one not in seen:
                seen.add(one)
                left.append(one)
    return False


def _tensor_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A tensor that is there once the operation has drawn; some give several."""
    if isinstance(node.meta.get("val"), Tensor) or node.target in (_ops.filled.default, _aten.copy_.default):
        return node
    return graph.call_function(operator.getitem, (node, 0))


def _value(node: Any) -> Any:
    return node.meta["val"]


# ---- operations of ours; that one draws `after` another is all that it takes the other's tensor for


@torch.library.custom_op("pl_pipe::dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _dropout(
    x: Tensor,
    p: float,
    strides: Sequence[int],
    shift: int,
    after: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    if not _lies(x, strides, shift):
        x = _laid_out(x, strides, shift)
    return torch.native_dropout(x, p, True)


@_dropout.register_fake
def _(x: Tensor, p: float, strides: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    laid_out = x.new_empty_strided(x.shape, strides)
    return torch.empty_like(laid_out), torch.empty_like(laid_out, dtype=torch.bool)


@torch.library.custom_op("pl_pipe::filled", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    how: str,
    numbers: Sequence[float],
    after: Tensor | None,  # noqa: ARG001
) -> Tensor:
    given = map(int, numbers) if how == _WHOLE else numbers
    filled: Tensor = getattr(torch.empty_strided(shape, strides, dtype=dtype, device=device), how)(*given)
    return filled


@_drawn.register_fake
def _(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


_ops = torch.ops.pl_pipe


def _lies(x: Tensor, strides: Sequence[int], shift: int) -> bool:
    alike = all(size == 1 or mine == wanted for size, mine, wanted in zip(x.shape, x.stride(), strides, strict=True))
    return alike and shift_of(x) == shift


def _laid_out(x: Tensor, strides: Sequence[int], shift: int) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    return x.new_empty(shift + extent).as_strided(x.shape, strides, shift).copy_(x)
