"""Compiled steps draw the numbers that the same step draws uncompiled, wherever the compiler lays tensors."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay import compiled, trace
from pl_pipe.fusion.replay.drawing import hold_draws, shift_of

SHAPE = (4, 3, 5, 4)
P = 0.4
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def given(device: str = "cpu") -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(device)


def traced(step: Callable[[Tensor], list[Tensor]], x: Tensor) -> fx.GraphModule:
    return trace(lambda: step(x), state=[x], inputs=[]).graph


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 3))[..., : x.shape[-1]]


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def behind_a_round_address(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = [Tensor.contiguous, padded, channels_last, behind_a_round_address]


@pytest.mark.parametrize("wanted", LAYOUTS)
@pytest.mark.parametrize("found", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_is_that_of_the_layout_it_was_traced_with(wanted: Any, found: Any, device: str) -> None:
    torch.manual_seed(1)
    plain = wanted(given(device))
    out, mask = torch.native_dropout(plain, P, True)
    torch.manual_seed(1)
    layout = list(plain.stride()), shift_of(plain)
    mine = torch.ops.pl_pipe.dropout(found(given(device)), P, *layout, None)
    assert torch.equal(mine[0], out)
    assert torch.equal(mine[1], mask)
    assert mine[0].stride() == out.stride()


@pytest.mark.parametrize(
    ("device", "layout"),
    [(DEVICES[0], channels_last), *(pytest.param("cuda", one, marks=DEVICES[1].marks) for one in LAYOUTS[1:])],
)
def test_layouts_matter(device: str, layout: Any) -> None:
    """Else the test above could not fail."""
    torch.manual_seed(1)
    mask = torch.native_dropout(given(device), P, True)[1]
    torch.manual_seed(1)
    assert not torch.equal(torch.native_dropout(layout(given(device)), P, True)[1], mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_traced_is_what_the_operation_asks_for(layout: Any) -> None:
    x = layout(given())
    graph = traced(lambda x: [torch.native_dropout(x, P, True)[0]], x)
    hold_draws(graph)
    [node] = graph.graph.find_nodes(op="call_function", target=torch.ops.pl_pipe.dropout.default)
    assert node.args[2:] == (list(x.stride()), shift_of(x), None)


def independent(x: Tensor) -> list[Tensor]:
    """Nothing here depends on what was drawn before it; two are given the same."""
    return [
        torch.native_dropout(x, P, True)[0],
        torch.native_dropout(x, P, True)[0],
        F.dropout(x, P),
        F.dropout2d(x, P),
        torch.rand_like(x) + x,
        torch.randn_like(channels_last(x)) + x,
        torch.randn(x.shape, dtype=x.dtype, device=x.device) * x,
        x + torch.empty_like(x).uniform_(-1, 2),
        x + torch.empty_like(x).normal_(1.0, std=2.0),
        x + torch.empty_like(x).exponential_(),
        x + torch.bernoulli(x, P),
        x + torch.randint(7, SHAPE, device=x.device),
        x + torch.randint(-3, 3, SHAPE, dtype=torch.int32, device=x.device),
    ]


def following(x: Tensor) -> list[Tensor]:
    """Masks that depend on earlier ones, as in any sequence of layers."""
    h = F.dropout(x, P) * 2
    return [F.dropout(torch.sigmoid(h), P), h]


@pytest.mark.slow
@pytest.mark.parametrize("step", [independent, following])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_draws_are_the_same(step: Callable[[Tensor], list[Tensor]], device: str) -> None:
    x = given(device)
    run = compiled(traced(step, x), [x], trains=False)
    for seed in range(3):
        torch.manual_seed(seed)
        found = run(x)
        state = generator_state(device)
        torch.manual_seed(seed)
        for place, (mine, plain) in enumerate(zip(found, step(x), strict=True)):
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-6, msg=lambda told, at=place: f"{at}: {told}")
        assert torch.equal(generator_state(device), state)


def generator_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def test_draws_are_a_chain() -> None:
    """Each depends on the one before it, which no compiler may change."""
    graph = traced(independent, given())
    hold_draws(graph)
    ours = [node for node in graph.graph.nodes if str(node.target).startswith("pl_pipe.")]
    assert len(ours) == 13
    for before, node in pairwise(ours):
        after: Any = node.args[-1]
        assert before in (after, *after.all_input_nodes), node


@pytest.mark.parametrize("step", [torch.bernoulli, torch.poisson, lambda x: torch.multinomial(x.flatten(1), 2)])
def test_what_is_drawn_otherwise_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    x = given().sigmoid()
    with pytest.raises(FusionError, match=r"draws random numbers by aten\.\w+.*, and compiled it would draw others"):
        compiled(traced(lambda x: [step(x)], x), [x], trains=False)
