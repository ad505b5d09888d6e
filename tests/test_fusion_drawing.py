"""Compiled steps draw the numbers that the same step draws uncompiled, wherever the compiler lays tensors."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config
from torch.nn.attention import SDPBackend, sdpa_kernel

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay import compiled, divided, trace
from pl_pipe.fusion.replay.drawing import hold_draws
from pl_pipe.fusion.replay.draws import shift_of
from pl_pipe.fusion.replay.graph_facts import is_random
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, loader, trainer

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


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


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


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_of_what_was_expanded(device: str) -> None:
    """Its numbers lie in the same memory, to which nothing can be written."""
    plain = expanded(given(device))
    torch.manual_seed(1)
    wanted = torch.native_dropout(plain, P, True)
    torch.manual_seed(1)
    found = torch.ops.pl_pipe.dropout(plain.contiguous(), P, list(plain.stride()), 1, None)
    assert torch.equal(found[0], wanted[0])


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
        x + torch.randint(0, 2**53 + 1, SHAPE, device=x.device) % 7,
        x + torch.randint(0, 2**63 - 1, SHAPE, device=x.device) % 7,
        x + torch.randint_like(x, 5),
        x + torch.randint_like(x, 2, 5),
        x + torch.randn(SHAPE, generator=None, device=x.device),
        x + torch.normal(1.0, 2.0, SHAPE, device=x.device),
        x + torch.bernoulli(x, 0.0),
        torch.native_dropout(x, 0.0, True)[0],
        torch.native_dropout(torch.randn_like(x), P, True)[0],
        torch.native_dropout(x, P, False)[0],
        torch.native_dropout(x[:0], P, True)[0],
        x + torch.empty_like(x).normal_().uniform_(),
        torch.rand_like(x),
    ]


def following(x: Tensor) -> list[Tensor]:
    """Masks that depend on earlier ones, as in any sequence of layers."""
    h = F.dropout(x, P) * 2
    return [F.dropout(torch.sigmoid(h), P), h]


def overwritten(x: Tensor) -> list[Tensor]:
    """What was drawn into is something else when the next is drawn."""
    one = torch.empty_like(x).uniform_()
    bits = (one > P).to(x)
    one.zero_()
    two = torch.rand_like(x)
    copy = two * 1
    two.zero_()
    dropped, mask = torch.native_dropout(x, P, True)
    kept = dropped * mask
    dropped.zero_()
    return [torch.rand_like(x) + x, bits + one, copy + two, kept + dropped]


@pytest.mark.slow
@pytest.mark.parametrize("step", [independent, following, overwritten])
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


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose kernels these are")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p", [0.0, P])
def test_attention_of_compiled_steps_drops_the_same(kernel: SDPBackend, p: float) -> None:
    """Forward and backward, after a product whose columns the compiler pads, and between other draws."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 10, 24, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(24, 3 * 96, generator=generator).div(5).to("cuda", torch.bfloat16).requires_grad_()
    seed = torch.ones((), device="cuda")

    def step() -> list[Tensor]:
        inputs = F.dropout(x, P) @ weight
        query, key, value = (one.unflatten(-1, (3, 32)).transpose(1, 2) for one in inputs.chunk(3, -1))
        h = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        loss = F.dropout(h.float().square(), P).mean()
        return [loss.detach(), h.detach(), *torch.autograd.grad(loss, [weight], seed)]

    with sdpa_kernel(kernel), config.patch(force_shape_pad=True):
        run = compiled(trace(step, state=[weight], inputs=[x, seed]).graph, [weight, x, seed])
        for number in range(3):
            torch.manual_seed(number)
            found = run(weight, x, seed)
            state = generator_state("cuda")
            torch.manual_seed(number)
            for mine, plain in zip(found, step(), strict=True):
                torch.testing.assert_close(mine, plain, rtol=0.05, atol=0.05 * float(plain.abs().max()))
            assert torch.equal(generator_state("cuda"), state)


def generator_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def test_draws_are_a_chain() -> None:
    """Each depends on the one before it, which no compiler may change."""
    graph = traced(independent, given())
    hold_draws(graph)
    ours = [node for node in graph.graph.nodes if str(node.target).startswith("pl_pipe.")]
    assert len(ours) == 26
    for before, node in pairwise(ours):
        after: Any = node.args[-1]
        assert before in (after, *after.all_input_nodes), node


@pytest.mark.parametrize("step", [torch.bernoulli, torch.poisson, lambda x: torch.multinomial(x.flatten(1), 2)])
def test_what_is_drawn_otherwise_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    x = given().sigmoid()
    with pytest.raises(FusionError, match=r"draws random numbers by aten\.\w+.*, of which it is not known"):
        compiled(traced(lambda x: [step(x)], x), [x], trains=False)


@pytest.mark.parametrize(
    ("step", "draws"),
    [
        (lambda x: torch.bernoulli(x, 0.0), True),
        (lambda x: torch.native_dropout(x, 0.0, True)[0], True),
        (lambda x: torch.native_dropout(x, P, False)[0], False),
        (lambda x: torch.native_dropout(x[:0], P, True)[0], False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0), False),
        (lambda x: F.dropout(x, 0.0), False),
    ],
)
def test_what_takes_numbers_draws(step: Callable[[Tensor], Tensor], draws: bool) -> None:
    x = given()
    before = torch.get_rng_state()
    found = trace(lambda: [step(x)], state=[x], inputs=[])
    assert found.is_random == draws
    assert torch.equal(torch.get_rng_state(), before) != draws


def test_a_draw_of_the_batch_alone_is_each_variants_own() -> None:
    """What it is given is computed once; the draw knows its layout nevertheless."""
    x, weight = given(), torch.ones(4)

    def step() -> list[Tensor]:
        normal = (channels_last(x) - x.mean(0)) / x.std(0)
        return [torch.native_dropout(normal, P, True)[0] * weight + torch.bernoulli(x, 0.0)]

    graph = trace(step, state=[weight], inputs=[x, torch.ones(())]).graph
    found = divided(graph, [1])
    assert found is not None
    assert not any(is_random(node) for node in found.once.graph.nodes)
    hold_draws(found.each)
    [node] = found.each.graph.find_nodes(op="call_function", target=torch.ops.pl_pipe.dropout.default)
    assert node.args[2] == list(channels_last(x).stride())


class Noisy(torch.autograd.Function):
    """Draws in the backward, by operations that depend on nothing that it is given."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + torch.randn_like(gradients[0]) + torch.rand(gradients[0].shape[-1])


@pytest.mark.slow
def test_draws_of_a_backward_are_made_once() -> None:
    """The next step would begin elsewhere."""
    weight, x, seed = torch.randn(4, 4, requires_grad=True), given(), torch.ones(())

    def step() -> list[Tensor]:
        h = F.dropout(Noisy.apply(F.dropout(x @ weight, P)) @ weight, P)
        loss = h.square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [weight], seed)]

    run = compiled(trace(step, state=[weight], inputs=[x, seed]).graph, [weight, x, seed])
    torch.manual_seed(1)
    found = run(weight, x, seed)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for mine, plain in zip(found, step(), strict=True):
        torch.testing.assert_close(mine, plain)
    assert torch.equal(torch.get_rng_state(), state)


@torch.library.custom_op("pl_pipe_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.randn_like(x)


@torch.library.custom_op("pl_pipe_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_operations_that_do_not_say_that_they_draw_are_known() -> None:
    x = given()
    found = trace(lambda: [F.dropout(x, P) + doubled(x)], state=[x], inputs=[])
    assert not found.unsaid
    found = trace(lambda: [noise(x) - noise(x)], state=[x], inputs=[])
    assert found.is_random
    assert set(found.unsaid) == {"pl_pipe_tests.noise.default"}


class Foreign(Classifier):
    """Plain, but for noise that an extension draws."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(noise(batch[0]) + batch[0]), batch[1])


def test_steps_with_such_operations_are_not_compiled() -> None:
    told = "draws random numbers by pl_pipe_tests.noise.default, which does not say so"
    running = trainer(strategy=FusionStrategy([{"lr": 0.1}, {"lr": 0.03}], formulation="compiled branches"))
    with pytest.raises(FusionError, match=told):
        running.fit(Foreign(), loader())


def test_what_cannot_be_written_down_is_named() -> None:
    x = given()
    with pytest.raises(
        FusionError, match=r"test_fusion_drawing.py:\d+: the step calls aten.random_.from, which cannot"
    ):
        trace(lambda: [x + torch.empty_like(x).random_(0, 3)], state=[x], inputs=[])
