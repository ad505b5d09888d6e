"""A step's graph as forward and backward, each compiled by itself. graph of both -> *halves* -> one function.

Between the two lie the numbers that the forward keeps. Which ones, and what the backward computes again instead, is
chosen by torch's own minimum cut, as for any compiled training: less is written to memory and read from it.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pl_pipe.fusion.replay.graph_facts import is_random

Compile = Callable[..., Callable[[list[Any]], Sequence[Any]]]
_SEED = "tangents_0"
"""By such a name the partitioner knows where the backward comes from."""


def compiled_halves(graph: fx.GraphModule, compile_one: Compile) -> Callable[[list[Any]], list[Any]] | None:
    """Of a functional graph whose last argument is what gradients are multiples of. None if it has no such halves."""
    seed = graph.graph.find_nodes(op="placeholder")[-1]
    [output] = graph.graph.find_nodes(op="output")
    outputs = _outputs(output)
    backward = _following(seed)
    places = sorted(range(len(outputs)), key=lambda place: outputs[place] in backward)
    """The forward's first."""
    kept = sum(one not in backward for one in outputs)
    if kept == len(outputs):
        return None
    output.args = (tuple(outputs[place] for place in places),)
    output.meta.pop("desc", None)
    seed.target = _SEED
    seed._rename(_SEED)
    for write in _writes(graph):  # which in a graph without autograd are taken for the backward's
        write.meta["partitioner_tag"] = "must_be_in_forward"
    graph.recompile()
    written = _written(graph)
    halves = _cut(graph, kept)
    if _written(halves[0]) != written or written & set(_names(halves[1])):
        return None  # the backward would write, or see what the forward has written
    if _draws_again(*halves):
        return None
    first, second = _both_compiled(*halves, kept, compile_one)

    def run(arguments: list[Any]) -> list[Any]:
        seeds = [arguments.pop()]
        found = list(first(arguments))
        given = found[kept:] + seeds
        del found[kept:]  # the backward gives back what it has read
        found += second(given)
        return [one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _cut(graph: fx.GraphModule, kept: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(graph, None, num_fwd_outputs=kept)


def _draws_again(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Whether the backward would draw what the forward has drawn. What it repeats for nobody is taken out of it: torch
    removes nothing that draws, and the next step would begin with other random numbers."""
    drawn = {node.name for node in forward.graph.nodes if is_random(node)}
    for node in reversed(backward.graph.nodes):
        if not node.users and (node.name in drawn or node.target is operator.getitem):
            backward.graph.erase_node(node)
    backward.recompile()
    return any(node.name in drawn for node in backward.graph.nodes)


def _both_compiled(
    forward: fx.GraphModule, backward: fx.GraphModule, kept: int, compile_one: Compile
) -> tuple[Callable[[list[Any]], Sequence[Any]], Callable[[list[Any]], Sequence[Any]]]:
    from torch._guards import TracingContext

    with TracingContext.report_output_strides() as strides:
        _keep_strides(forward, kept)
        first = compile_one(forward, _values(forward), is_inference=False, static_input_idxs=_single(forward))
    given = _values(backward)
    for place, stride in enumerate((strides or [])[kept:]):
        if stride is not None:  # the compiler may have chosen another layout for what only the backward sees
            given[place] = given[place].as_strided(given[place].shape, stride)
    _keep_strides(backward, None)
    own = set(_names(backward)[:-1]) - set(_names(forward))
    static = {place for place, name in enumerate(_names(backward)) if name in own}  # others lie wherever they lie
    static.update(_single(backward))
    second = compile_one(backward, given, is_inference=False, is_backward=True, static_input_idxs=sorted(static))
    return first, second


def _keep_strides(graph: fx.GraphModule, count: int | None) -> None:
    [output] = graph.graph.find_nodes(op="output")
    seen = [place for place, one in enumerate(_outputs(output)) if isinstance(one, fx.Node)]
    output.meta["user_visible_output_idxs"] = seen if count is None else [place for place in seen if place < count]


def _outputs(output: fx.Node) -> list[Any]:
    return list(output.args[0])  # type: ignore[arg-type]


def _values(graph: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def _single(graph: fx.GraphModule) -> list[int]:
    """Arguments of one number, such as a counter of batch norm in an array: wherever they lie, they can be read as they
    are. Others that do not lie at a multiple of 16 bytes are copied before each step, as the compiler's kernels ask."""
    return [
        place for place, value in enumerate(_values(graph)) if isinstance(value, torch.Tensor) and value.numel() == 1
    ]


def _following(node: fx.Node) -> set[fx.Node]:
    """All that depends on it, itself included."""
    found = {node}
    for later in node.graph.nodes:
        if not found.isdisjoint(later.all_input_nodes):
            found.add(later)
    return found


def _written(graph: fx.GraphModule) -> set[str]:
    return {node.all_input_nodes[0].name for node in _writes(graph)}


def _writes(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))


def _names(graph: fx.GraphModule) -> list[str]:
    return [node.name for node in graph.graph.find_nodes(op="placeholder")]
