"""Awkward steps: what people write in a forward that a pipeline might get wrong.

Each case is the middle of a small model whose four layers a, b, c, d stand on up to four stages:

    2 stages  a b | c d        3 stages  a | b | c d        4 stages  a | b | c | d
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ghost_models import Trial
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CUTS = {2: (0, 0, 1, 1), 3: (0, 1, 2, 2), 4: (0, 1, 2, 3)}
LAYERS = ("a", "b", "c", "d")
WIDTH = 8
Case = Callable[[Any, Tensor, Tensor], Tensor]
CASES: dict[str, Case] = {}
PARTS: dict[str, dict[str, Callable[[], nn.Module]]] = {}
"""Modules that a case puts in the place of layers."""
REFUSED: dict[str, str] = {}
"""Cases that cannot work, with a part of what the error must say."""
ROUNDED: set[str] = set()
"""Cases that are equal up to the order in which gradients are added."""


class Net(nn.Module):
    def __init__(self, case: Case, parts: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.case = case
        for name in LAYERS:
            self.add_module(name, parts[name]() if name in parts else nn.Linear(WIDTH, WIDTH))
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.prev: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.d(self.case(self, x, y)).tanh().pow(2).mean()


def trial(name: str, *, autocast: bool = False) -> Trial:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, count, WIDTH, generator=generator).unbind() for count in (4, 4, 4, 3)]
    return Trial(lambda: Net(CASES[name], PARTS.get(name, {})), lambda net, b: net(*b), batches, autocast=autocast)


def owners(name: str, stages: int) -> dict[str, int]:
    """The four layers by the cuts above; relu and its like stand where a plan finds them called, on b's stage."""
    cut = dict(zip(LAYERS, CUTS[stages], strict=True))
    model = Net(CASES[name], PARTS.get(name, {}))
    found = {}
    for part, module in model.named_modules():
        is_leaf = next(module.children(), None) is None or isinstance(module, nn.MultiheadAttention)
        if part and is_leaf and "out_proj" not in part:
            found[part] = cut.get(part.split(".")[0], cut["b"])
    return found


def case(
    function: Case | None = None, *, refused: str = "", rounding: bool = False, **parts: Callable[[], nn.Module]
) -> Any:
    def add(function: Case) -> Case:
        CASES[function.__name__] = function
        if parts:
            PARTS[function.__name__] = parts
        if refused:
            REFUSED[function.__name__] = refused
        if rounding:
            ROUNDED.add(function.__name__)
        return function

    return add if function is None else add(function)


# ---- straight and skipping


@case
def straight(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case
def skip(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h) + h)


@case
def long_skip_and_batch_late(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h)) + h * y


@case
def used_on_every_stage(s: Any, x: Tensor, y: Tensor) -> Tensor:
    """Its gradient is a sum of several, and sums depend on their order."""
    h = s.a(x)
    return s.c(s.b(h) * h) * h + s.d(h)


@case(rounding=True)
def used_at_home_between_other_stages(s: Any, x: Tensor, y: Tensor) -> Tensor:
    """Uses at home stand between uses elsewhere, whose gradients come in one sum: the order cannot be kept."""
    h = s.a(x)
    return s.c(s.b(h) * h.sin()) * h.cos() + s.d(h)


@case
def module_twice(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.b(s.a(x))))


@case
def called_back_from_a_later_stage(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    return h + s.a(h)


@case
def two_branches(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)) + s.b(s.a(y)))


@case
def order_against_the_plan(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.a(s.b(s.c(x)))


@case
def identity_modules(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.same(s.a(x))
    return s.c(s.same(s.b(s.drop(h))) + h) + s.same(y)


@case
def unused_layer(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    s.b(h)
    return s.c(h)


@case
def detached(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h.detach())) + h.detach()


@case
def without_gradient(s: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.a(x)
    return s.c(s.b(h))


@case
def gradient_begins_late(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x).detach().requires_grad_()
    return s.c(s.b(h) * h)


@case
def gradient_hook(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return s.c(s.b(h))


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


@case(b=_frozen)
def frozen_in_the_middle(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(a=_frozen, b=_frozen)
def frozen_at_the_start(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


# ---- in place


@case
def add_onto(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = s.b(h)
    g += h
    return s.c(g)


@case
def relu_in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    F.relu_(h)
    return s.c(s.b(h) + h)


@case
def relu_argument(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    F.relu(h, inplace=True)
    return s.c(s.b(h) + h)


@case
def relu_module_in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    g = s.relu(h)
    return s.c(s.b(g) + h)


@case
def set_items(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = s.b(h) * 1
    g[:, :2] = h[:, :2]
    g[:, 3] = 0
    return s.c(g)


@case
def set_items_of_a_free_tensor(s: Any, x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(x.shape)
    buffer[:, :4] = s.a(x)[:, :4]
    return s.c(s.b(buffer))


@case
def free_view_written(s: Any, x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(x.shape)
    part = buffer[:, :4]
    part.copy_(s.a(x)[:, :4])
    return s.c(s.b(buffer) + buffer)


@case
def memory_of_a_written_tensor_used_again(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    total = torch.zeros(WIDTH).index_add_(0, torch.arange(WIDTH), h.sum(0)).sum()
    later = [x.sum(0) * count for count in range(8)]
    return s.c(s.b(h) + total) + torch.stack(later).sum(0)


@case
def connectionist_classification(s: Any, x: Tensor, y: Tensor) -> Tensor:
    steps, labels = s.a(x).reshape(-1, 2, WIDTH // 2).log_softmax(-1), torch.tensor([1, 2])
    lengths, ones = torch.full((2,), len(steps)), torch.ones(2, dtype=torch.long)
    each = F.ctc_loss(steps, labels, lengths, ones, reduction="none")
    mean = torch.ctc_loss(s.b(x).log_softmax(-1), labels[:1], torch.tensor(len(x)), ones[0])
    return s.c(s.b(y) * each.sum() + mean + F.ctc_loss(steps, labels, lengths, ones))


@case
def view_then_in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    h[:, :2].mul_(3)
    return s.c(s.b(h) + h)


@case
def view_sees_the_change(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    part = h[:, :4]
    g = s.b(y) + part.sum()
    h.add_(1)
    return s.c(g * part.sum())


@case
def view_sent_again_after_a_change(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    part = h[:, :4]
    g = s.c(y)[:, :4] + part
    h.add_(1)
    return torch.cat([g + part, s.b(y)[:, 4:]], 1)


@case
def changed_by_a_later_stage(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    g = s.b(y)
    h.add_(g)
    return s.c(h)


@case
def changed_over_a_view_that_nobody_uses_again(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    total = h.view(-1).sum()
    h += s.b(y)
    return s.c(h * total)


@case
def changed_after_it_was_sent(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    kept = h.detach().clone()
    g = s.b(h)
    first = g + kept
    kept.mul_(2)
    return s.c(first + (g + kept))


@case
def out_argument(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    result = torch.empty_like(h).detach()
    torch.add(h.detach(), 1, out=result)
    return s.c(s.b(h) + result)


@case
def detach_in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = s.b(h) * 1
    g.detach_()
    return s.c(g + h)


@case(refused="change a copy")
def changed_under_an_earlier_view(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    part = h[:, :2]
    h.add_(s.c(y))
    return s.b(h) + part.sum()


@case(refused="changes a parameter or buffer")
def buffer_changed_by_a_later_stage(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    s.running.mul_(0.9).add_(h.detach().mean(0))
    return h + s.running


# ---- checkpoints, custom functions, autograd


@case
def checkpoint_reentrant(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(checkpoint(s.b, s.a(x), use_reentrant=True))


@case
def checkpoint_without_reentry(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(checkpoint(s.b, h, use_reentrant=False) + h)


@case
def checkpoint_of_a_method(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(checkpoint(s.b.__call__, s.a(x), use_reentrant=False))


@case
def checkpoint_across_stages(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda h: s.c(s.b(h).relu()), s.a(x), use_reentrant=False)


@case
def checkpoint_across_stages_reentrant(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda h: s.c(s.b(h).relu()), s.a(x), use_reentrant=True)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor * 3, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


scaled = Scaled.apply  # as people write it, at the top of a file


@case
def custom_function(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(scaled(s.a(x), 0.5)))


@case
def custom_function_across_stages(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(Product.apply(h, s.b(h)))


@case(refused="return the loss instead")
def gradients_inside(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    (gradient,) = torch.autograd.grad(h.sum(), s.c.weight, create_graph=True)
    return h + gradient.sum()


# ---- reads


@case
def read_at_the_end(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    s.__dict__["seen"] = h.mean().item()
    return h


@case
def read_in_the_middle(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    factor = 2.0 if h.sum().item() > 0 else 3.0
    return s.c(s.b(h) * factor)


@case
def branch_on_a_value(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    if (h > 0).any():
        h = h * 2
    return s.c(h)


@case
def branch_on_the_batch(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h)) if x.sum() > 0 else s.c(s.b(h) + h)


@case
def printed(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    assert "nonsense" not in repr(h) + f"{h.sum().detach():.3f}"
    return h


@case(refused="move the read behind this use")
def needed_after_a_read(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = s.c(s.b(h))
    factor = g.sum().item()
    return s.c(g * factor + h)


class ReadsInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)


@case(b=lambda: ReadsInside(WIDTH, WIDTH), refused="move the read out of the module")
def read_inside_a_module(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


# ---- shapes that follow from values


@case
def masked_by_the_batch(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    chosen = h[y > 0]
    return s.c(s.b(h) + chosen.sum() + h.masked_select(y < 0).mean())


@case
def rows_masked_by_the_batch(s: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = x.abs().sum(1) > x.abs().sum(1).min()
    return s.c(s.b(s.a(x)[rows]))


class MasksInside(nn.Linear):
    """What it returns depends on numbers of the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x)[y[:, 0] > 0]


@case(b=lambda: nn.ModuleDict({"mask": MasksInside(WIDTH, WIDTH)}))
def masked_inside_a_module(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    for shown in (y, -y, y, -y, y.abs() + 1):
        h = torch.cat([h, s.b["mask"](h[: len(y)], shown)])
    return s.c(h)


@case
def masked_by_a_value(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    return h + h[h > 0].sum()


@case
def masked_by_a_value_early(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h[h > 0][None, :1].expand(2, WIDTH)))


@case
def unique_of_a_result(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    return h * len(torch.unique(h.argmax(1)))


@case
def places_in_a_result(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.c(s.b(s.a(x)))
    rows, _ = torch.where(h > 0)
    return h * len(rows)


@case
def repeated(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x).repeat_interleave(2, 0)
    counts = torch.tensor([1, 2]).repeat(len(x))
    return s.c(s.b(h).repeat_interleave(counts, 0))


@case
def filled_and_chosen(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = s.b(h).masked_fill(y > 0, 0.5)
    return s.c(torch.where(x > 0, g, h))


@case
def gathered(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    order = y.argsort(1)
    return s.c(s.b(h.gather(1, order)) + h[torch.arange(len(h)).flip(0)])


# ---- weights outside their modules


@case
def tied_functionally(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(F.linear(s.b(s.a(x)), s.a.weight))


@case
def parameter_of_the_root(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)) * s.scale) + s.scale


@case
def buffer_of_the_root(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    s.running.mul_(0.9).add_(h.detach().mean(0) * 0.1)
    return s.c(s.b(h) + s.running)


@case(b=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
def weight_norm(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(b=lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))
def spectral_norm_by_hook(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(b=lambda: nn.BatchNorm1d(WIDTH))
def batch_norm(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(b=lambda: nn.BatchNorm1d(WIDTH), refused="changes a parameter or buffer")
def batch_norm_called_back(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.b(s.c(s.b(s.a(x))))


# ---- what modules take, return and keep


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


class Named(NamedTuple):
    first: Tensor
    count: int


class Returns(nn.Linear):
    kind: str = ""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        if isinstance(x, Pair):
            x = x.first
        if isinstance(x, list):
            x = sum(x)
        h = super().forward(x)
        view = h[:, :4]
        options = {
            "dataclass": Pair(h, view),
            "dict": {"out": h, "again": h, "n": len(h)},
            "named": Named(h, 3),
            "nested": (h, [view, None], {"k": (h, 2)}),
            "object": type("Thing", (), {})(),
        }
        options["object"].__dict__["tensor"] = h
        return options.get(self.kind, h)


@case(a=lambda: Returns("dataclass"), b=lambda: Returns("dataclass"))
def dataclasses_in_and_out(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    return s.c(h.first) + h.second.sum()


@case(b=lambda: Returns("dict"))
def dictionary_with_one_tensor_twice(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    return s.c(h["out"] * h["n"]) + h["again"]


@case(b=lambda: Returns("named"))
def named_tuple(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    return s.c(h.first * h.count)


@case(b=lambda: Returns("nested"), c=lambda: Returns("list"))
def nested_outputs_and_lists(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g, (part, nothing), more = s.b(h)
    assert nothing is None
    return s.c([g, more["k"][0], h]) + part.mean()


@case(b=lambda: Returns("object"))
def opaque_output(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)).tensor)


class Keeps(nn.Linear):
    """Keeps tensors and counts between calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = super().forward(x)
        if self.state is not None and len(self.state) == len(h):
            h = h + self.state * self.calls
        self.state = h.detach()
        return h


@case(b=Keeps)
def state_between_steps(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(b=Keeps)
def attribute_left_by_a_module(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    return s.c(h * 2) + s.b.state


@case
def attribute_of_the_root_between_steps(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    if s.prev is not None and s.prev.shape == h.shape:
        h = h + s.prev
    s.prev = h.detach()
    return s.c(h)


class HiddenInput(nn.Linear):
    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.memory is not None
        return super().forward(x) + self.memory


@case(b=lambda: HiddenInput(WIDTH, WIDTH))
def input_through_an_attribute(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    s.b.memory = y
    return s.c(s.b(h))


@case(b=lambda: HiddenInput(WIDTH, WIDTH), refused="pass it to the module as an argument")
def ghost_through_an_attribute(s: Any, x: Tensor, y: Tensor) -> Tensor:
    s.b.memory = s.a(x)
    return s.c(s.b(y))


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.register_forward_hook(lambda _, args, out: out + args[0])


@case(b=Hooked)
def forward_hooks(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)))


@case(b=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
def container_of_one_stage(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.c(s.b(s.a(x)) + s.b[0](y))


@case(b=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention_module(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)[None]
    return s.c(s.b(h, h, h, need_weights=False)[0][0])


@case(b=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def recurrent_with_state(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h, state = s.b(s.a(x)[None])
    g, _ = s.b(h, state)
    return s.c(g[0])


# ---- operations


@case
def iterated_and_unpacked(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    left, right = s.b(h).chunk(2, 1)
    rows = torch.stack([row * index for index, row in enumerate(h)])
    return s.c(torch.cat([right, left], 1) + rows)


@case
def several_results(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.b(s.a(x))
    values, indices = h.max(1)
    top = h.topk(2, dim=1)
    return s.c(h + values[:, None] + top.values.sum() + indices.float().mean() + h.argmax(0).float())


@case
def einsum_and_attention(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    g = torch.einsum("ni,ij->nj", s.b(h), torch.eye(WIDTH))
    q = g.view(1, len(g), 2, 4).transpose(1, 2)
    return s.c(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(len(g), WIDTH) + h)


@case
def made_like(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    line = torch.arange(h.size(1), device=h.device, dtype=h.dtype)
    ones = torch.ones_like(h) + h.new_zeros(h.shape) + line
    return s.c(s.b(h.to(x.device)).type_as(x) * ones.to(h)) + torch.zeros(h.shape[-1], device=h.device)


@case
def properties(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    assert h.device == x.device
    assert not h.is_cuda
    assert h.is_cpu
    assert h.shape == x.shape
    assert h.ndim == 2
    return s.c((s.b(h).T @ h).mT[:4, :].mean(0) + s.b(h.data))


@case
def shape_decides(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    for _ in range(h.shape[0] - 2):
        h = s.b(h).relu()
    return s.c(h.double().float() + F.pad(h, (1, 0))[:, :-1])


@case
def default_device_mode(s: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.device("cpu"):
        return s.c(s.b(s.a(x)) + torch.ones(WIDTH))


@case
def full_precision_inside(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    with torch.autocast("cpu", enabled=False):
        h = h.float() @ torch.eye(WIDTH)
    return s.c(s.b(h).float() + h)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@case
def custom_function_in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    g = s.b(y) + h
    Dirty.apply(h)
    return s.c(g + h)


@case
def in_place_by_position(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x) * 1
    g = s.b(y) + h
    k = F.leaky_relu(h, 0.1, True)
    return s.c(g + h * k)


@case
def deep_copied(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = s.a(x)
    return s.c(s.b(h) + copy.deepcopy(h.detach()))
