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
from pl_pipe.fusion.replay.draws import OPERATIONS, WHOLE
from pl_pipe.fusion.replay.graph_facts import is_random

_Numbers = Sequence[float | int]
_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_FILLED = {
    _aten.bernoulli_.float: "bernoulli_",
    _aten.uniform_.default: "uniform_",
    _aten.normal_.default: "normal_",
    _aten.exponential_.default: "exponential_",
}
_MADE: dict[Any, tuple[str, Callable[..., _Numbers]]] = {
    _aten.rand.default: ("uniform_", lambda *_: (0, 1)),
    _aten.rand.generator: ("uniform_", lambda *_: (0, 1)),
    _aten.rand_like.default: ("uniform_", lambda *_: (0, 1)),
    _aten.randn.default: ("normal_", lambda *_: (0, 1)),
    _aten.randn.generator: ("normal_", lambda *_: (0, 1)),
    _aten.randn_like.default: ("normal_", lambda *_: (0, 1)),
    _aten.normal.float_float: ("normal_", lambda mean, std, *_: (mean, std)),
    _aten.bernoulli.p: ("bernoulli_", lambda _, p: (p,)),
    _aten.randint.default: (WHOLE, lambda high, *_: (0, high)),
    _aten.randint.generator: (WHOLE, lambda high, *_: (0, high)),
    _aten.randint.low: (WHOLE, lambda low, high, *_: (low, high)),
    _aten.randint.low_generator: (WHOLE, lambda low, high, *_: (low, high)),
    _aten.randint_like.default: (WHOLE, lambda _, high: (0, high)),
    _aten.randint_like.low_dtype: (WHOLE, lambda _, low, high: (low, high)),
}
"""How torch draws them, too: it fills new memory; with which numbers, by the operation's arguments."""
_NOT_THE_COMPILERS = ("attention", "rnn")
"""Operations that it leaves as they are, and that draw for the places of a tensor, however it lies."""
_SHIFT = "pl_pipe_shift"


def note_shifts(graph: fx.GraphModule, shifts: Sequence[int]) -> None:
    """Of what dropouts were given when the graph was traced, one after another: see `shift_of`."""
    for node, shift in zip(graph.graph.find_nodes(op="call_function", target=_DROPOUT), shifts, strict=True):
        node.meta[_SHIFT] = shift


def hold_draws(graph: fx.GraphModule) -> None:
    """Changes the graph, a traced one that knows its tensors' layouts."""
    before: fx.Node | None = None
    for node in [node for node in graph.graph.nodes if is_random(node)]:
        with graph.graph.inserting_before(node):
            after = None if before is None else _sign(graph.graph, before)
            before = _held(graph.graph, node, after) or _left(node, before)
    graph.recompile()


def _held(graph: fx.Graph, node: fx.Node, after: fx.Node | None) -> fx.Node | None:
    """Puts an operation of ours in its place; None where there is none for it."""
    given: Any = node.args[0] if node.args else None
    if node.kwargs.get("generator") is not None:
        return None
    if node.target is _DROPOUT:
        layout = list(_value(given).stride()), node.meta.get(_SHIFT, 0)
        drawn = graph.call_function(OPERATIONS.dropout.default, (given, node.args[1], *layout, after))
        _replace(node, drawn)  # whose results come first
        return drawn
    if node.target in _FILLED:
        drawn, numbers = _filled(graph, _FILLED[node.target], _numbers(node), _value(given), after)
        _replace(node, graph.call_function(_aten.copy_.default, (given, numbers)))
        return drawn
    if node.target in _MADE:
        how, numbers_of = _MADE[node.target]
        drawn, numbers = _filled(graph, how, numbers_of(*node.args), _value(node), after)
        _replace(node, numbers)
        return drawn
    return None


def _filled(
    graph: fx.Graph, how: str, numbers: _Numbers, like: Tensor, after: fx.Node | None
) -> tuple[fx.Node, fx.Node]:
    layout = list(like.shape), list(like.stride()), like.dtype, like.device
    given = ([], [int(one) for one in numbers]) if how == WHOLE else ([float(one) for one in numbers], [])
    drawn = graph.call_function(OPERATIONS.filled.default, (*layout, how, *given, after))
    return drawn, graph.call_function(operator.getitem, (drawn, 0))


def _replace(node: fx.Node, other: fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _numbers(node: fx.Node) -> list[float]:
    """The distribution's, after the tensor."""
    arguments = node.target._schema.arguments[1:]  # type: ignore[union-attr]
    given = dict(zip((one.name for one in arguments), node.args[1:], strict=False)) | node.kwargs
    return [float(given.get(one.name, one.default_value)) for one in arguments if one.name != "generator"]


def _left(node: fx.Node, before: fx.Node | None) -> fx.Node:
    """To the compiler, which must not change what it draws."""
    if not any(kind in str(node.target) for kind in _NOT_THE_COMPILERS):
        raise FusionError(
            f"the step draws random numbers by {node.target}, of which it is not known that compiled it draws the same"
        )
    if before is not None and not _depends(node, before):
        raise FusionError(
            f"the step draws random numbers by {before.target} and {node.target}, which a compiler may do in another "
            "order"
        )
    return node


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


def _sign(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Something that is there once an operation has drawn, and to which nobody writes, as to a mask."""
    place = 2 if node.target is OPERATIONS.dropout.default else 1  # of attention, that is what its backward needs
    return graph.call_function(operator.getitem, (node, place))


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
