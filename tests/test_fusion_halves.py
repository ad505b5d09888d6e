"""A step's graph in two halves: the same numbers, writes in the forward alone, and less kept in between."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pl_pipe.fusion.replay import compiled, trace
from pl_pipe.fusion.replay.halves import compiled_halves

Step = Callable[..., list[Tensor]]


def functional(step: Step, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """As torch's compiler is given it: writes to arguments come last, and are taken for a backward's."""
    graph = make_fx(torch.func.functionalize(step, remove="mutations_and_views"), tracing_mode="fake")(*arguments)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        node.meta["partitioner_tag"] = "must_be_in_backward"
    return graph


class Kept:
    """In place of the compiler: runs graphs as they are, and remembers them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, graph: fx.GraphModule, example: Any, **options: Any) -> Callable[[list[Any]], Sequence[Any]]:
        assert len(example) == len(graph.graph.find_nodes(op="placeholder"))
        self.graphs.append(graph)
        self.options.append(options)
        return lambda arguments: graph(*arguments)


def writes(graph: fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))


def network(x: Tensor, weight: Tensor, mean: Tensor, count: Tensor, scale: Tensor) -> list[Tensor]:
    """A gradient, a value, and what a norm would keep: a running mean and a number of batches."""
    h = x @ weight
    out = F.gelu(torch.sigmoid(h) * torch.tanh(h))
    count += 1
    mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
    loss = out.square().mean()
    derivative = 2 * out / out.numel() * scale
    gate = torch.sigmoid(h) * (1 - torch.sigmoid(h)) * torch.tanh(h)
    return [x.T @ (derivative * gate) + 0.1 * scale * weight, loss, out]


def arguments(samples: int = 6) -> list[Tensor]:
    torch.manual_seed(1)
    given = [torch.randn(samples, 5), torch.randn(5, 4), torch.zeros(4), torch.tensor(3.0), torch.tensor(2.0)]
    return [one.double() for one in given]


def test_arguments_of_one_number_are_not_copied_for_where_they_lie() -> None:
    """The second variant's counter lies 8 bytes behind the first one's, and would be copied before each step."""
    kept = Kept()
    compiled_halves(functional(network, arguments()), kept)
    for graph, options in zip(kept.graphs, kept.options, strict=True):
        values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        single = {place for place, value in enumerate(values) if value.numel() == 1}
        assert single
        assert single <= set(options["static_input_idxs"])
    assert len(kept.options[0]["static_input_idxs"]) == 1, "x, weight and mean may lie anywhere, and are looked at"


@pytest.mark.parametrize("samples", [6, 1])
def test_halves_compute_and_write_what_the_whole_does(samples: int) -> None:
    kept = Kept()
    run = compiled_halves(functional(network, arguments(samples)), kept)
    assert run is not None
    mine, whole = arguments(samples), arguments(samples)
    for _ in range(3):
        for one, other in zip(run(list(mine)), network(*whole), strict=True):
            assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(mine, whole, strict=True))
    assert [writes(graph) for graph in kept.graphs] == [2, 0], "a backward would write to copies of arguments"
    assert [options.get("is_backward", False) for options in kept.options] == [False, True]


def test_what_is_quick_is_computed_again_and_not_kept() -> None:
    kept = Kept()
    compiled_halves(functional(network, arguments(512)), kept)
    [output] = kept.graphs[0].graph.find_nodes(op="output")
    large = {node.name for node in output.args[0] if node.meta["val"].numel() >= 512 * 4}  # type: ignore[union-attr]
    assert len(large) <= 3, "the value that is asked for, the product, and the batch"


def test_saved_arguments_may_lie_anywhere() -> None:
    kept = Kept()
    compiled_halves(functional(network, arguments()), kept)
    first, second = ([node.name for node in graph.graph.find_nodes(op="placeholder")] for graph in kept.graphs)
    static = [second[place] for place in kept.options[1]["static_input_idxs"]]
    assert not set(static) & set(first)
    assert {"x_1", "weight_1"} & set(second), "the backward reads arguments of the forward"


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda x, y, scale: [x.sum() + 0 * y[0, 0]], id="nothing follows from the last argument"),
        pytest.param(lambda x, y, scale: [x * scale, y.copy_(x * scale).sum(), x.sum()], id="the backward writes"),
        pytest.param(lambda x, y, scale: [(x.clone() * scale).sum(), x.add_(1).sum()], id="what is written is kept"),
    ],
)
def test_graphs_without_halves_stay_whole(step: Step) -> None:
    graph = functional(step, [torch.ones(3, 2), torch.ones(3, 2), torch.tensor(2.0)])
    assert compiled_halves(graph, Kept()) is None


@pytest.mark.slow
def test_compiled_halves_draw_and_write_as_the_step_does() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    layers = nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 36, 4)
    net = nn.Sequential(*layers).double()
    x, scale = torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    leaves = list(net.parameters())

    def step() -> list[Tensor]:
        loss = net(x).square().mean()
        return [*torch.autograd.grad(loss * scale, leaves), loss]

    state = [*leaves, *net.buffers()]
    traced = trace(step, state=state, inputs=(x, scale))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = compiled(traced.graph, [*state, x, scale])
    torch.manual_seed(7)
    found = run(*state, x, scale)
    buffers = [buffer.clone() for buffer in net.buffers()]
    net.load_state_dict(before)
    torch.manual_seed(7)
    for one, other in zip(found, step(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for one, other in zip(buffers, net.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
