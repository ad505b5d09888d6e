"""Operations of plain PyTorch on array tensors, against the same operations on each variant's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from tests.fusion_cases import assert_equal_to_separate, built, common

Operation = Callable[[Tensor, Tensor, Tensor], Any]


class Computes(nn.Module):
    """a [2, 3, 4] and b [4] are the variants' own, x [2, 3, 4] is shared, and so is what the operation makes itself."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation
        self.a = nn.Parameter(torch.randn(2, 3, 4))
        self.b = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Any:
        return self._operation(self.a * 1, self.b, x)


def written(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    out = a.clone()
    out[:, 1] = b
    out[0] += x[0]
    out[..., ::2] = 1.5
    out[x > 1] = 0.0
    out[:, [0, 2], 1] = x[:, :2, 0]
    return out


def filled(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(2, 3, 4, dtype=x.dtype)
    out[0] = b
    out.add_(a)
    return out


def new_and_filled(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    out = a.new_zeros(5, 4)
    out[:3] += b
    out[3:] = x[:, 0]
    return out


def in_place(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a.mul_(b).add_(x, alpha=2)
    a += 1
    a.clamp_(min=0.1)
    a[:, 0].mul_(b)
    a.view(6, 4)[1:].add_(x.view(6, 4)[1:])
    F.relu(a, inplace=True)
    return a


def by_shape(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    n, length, features = a.shape
    assert (a.size(), a.dim(), a.ndim, len(a), a.numel(), b.shape[0]) == (x.shape, 3, 3, 2, 24, features)
    assert (a.size(-1), a.is_floating_point(), a.stride()) == (features, True, (12, 4, 1))
    return a.view(n * length, -1).mm(a.view(n * length, features).t())


def chosen(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    if (a.abs() >= 0).all() and bool(torch.isfinite(b).all()):
        return a * float(a.shape[0]) + int(torch.ones_like(b).sum().item())
    return a * 0


def looped(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.stack([row * scale for row, scale in zip(a.unbind(1), b, strict=False)], dim=-1)


# fmt: off
OPERATIONS: dict[str, Operation] = {
    "add": lambda a, b, x: a + b + x + 1,
    "left": lambda a, b, x: (2 - a, 1 / b, 2**b, x - a, x * b, x / b),
    "compare": lambda a, b, x: (a > b, a == a, x < b, ~(a > 0), (a > 0) & (x > 0)),
    "number with tensor": lambda a, b, x: (a.mean() * x, b.sum() + a, a.sum().float() * x, x.float() + b.sum()),
    "unary": lambda a, b, x: (
        a.exp(), b.log(), torch.tanh(a), F.gelu(a), F.silu(b), F.softplus(a), F.leaky_relu(a, 0.2),
    ),
    "activations": lambda a, b, x: (F.hardswish(a), F.elu(a), F.mish(a), F.relu6(a), F.logsigmoid(a), F.selu(a)),
    "where": lambda a, b, x: (torch.where(x > 0, a, b), torch.where(a > 0, x, 0.0), a.masked_fill(x > 0, -1.0)),
    "clamp": lambda a, b, x: (a.clamp(-0.5, 0.5), torch.maximum(a, x), torch.min(a, b), torch.clamp(x, max=b)),
    "lerp": lambda a, b, x: (torch.lerp(a, x, 0.3), torch.addcmul(a, b, x), torch.addcdiv(x, a, b)),
    "reductions": lambda a, b, x: (
        a.sum(), a.mean(), b.sum(0), a.mean((0, -1)), a.sum(1, keepdim=True), a.mean(dim=[1]),
    ),
    "more reductions": lambda a, b, x: (
        a.var(1), a.std(), a.amax((0, 1)), a.logsumexp(-1), a.norm(), a.prod(2), a.norm(dim=1),
    ),
    "extremes": lambda a, b, x: (
        a.max(), a.max(1), a.min(-1).values, a.argmax(1), a.topk(2).values, a.sort(1), a.median(0),
    ),
    "softmax": lambda a, b, x: (a.softmax(0), F.softmax(a, dim=1), torch.log_softmax(a, -1), F.normalize(a), F.glu(a)),
    "cumulative": lambda a, b, x: (a.cumsum(1), a.cumprod(-1), a.flip(0), a.flip([1, 2]), a.roll(1, 2), a.diff(dim=1)),
    "shapes": lambda a, b, x: (
        a.flatten(), a.flatten(1), a.reshape(3, 8), a.unsqueeze(0), a.unsqueeze(-1), a[None].squeeze(0),
    ),
    "order": lambda a, b, x: (
        a.transpose(0, 2), a.permute(2, 0, 1), a.permute(-1, 0, 1), a.movedim(0, -1), a.mT, a[0].T,
    ),
    "views": lambda a, b, x: (
        a.view(6, 4), a.view(-1), a.view_as(x), b.expand(3, 4), b.expand_as(x), b.repeat(2, 1), a.swapaxes(0, 1),
    ),
    "after transpose": lambda a, b, x: (a.transpose(1, 2).reshape(2, 12), a.transpose(0, 1).contiguous().view(3, 8)),
    "parts": lambda a, b, x: (
        a.chunk(2, -1), a.split([1, 2], 1), a.unbind(), torch.tensor_split(a, 3, 1), a.select(1, 2),
    ),
    "joined": lambda a, b, x: (torch.cat([a, x], 1), torch.stack([x, a], -1), torch.cat((a, a)), torch.hstack([a, x])),
    "squeezed": lambda a, b, x: (
        a[:1].squeeze(), a[:, :1].squeeze(1), a.sum().unsqueeze(0), a.narrow(1, 1, 2), a.unflatten(2, (2, 2)),
    ),
    "indexed": lambda a, b, x: (a[0], a[:, 1:, ::2], a[..., -1], a[None, 0], a[-1, :, None], b[2], a[1, 2, 3]),
    "by tensors": lambda a, b, x: (a[:, torch.tensor([2, 0])], a[torch.tensor([1, 0]), torch.tensor([1, 1])], a[x > 0]),
    "apart": lambda a, b, x: (
        a[torch.tensor([1, 0]), :, torch.tensor([1, 3])], a[0, :, torch.tensor([1, 3])], a[[1, 0]],
    ),
    "by own": lambda a, b, x: (
        a.gather(2, a.argsort(-1)), x.gather(1, a.argmax(1, keepdim=True)), x[0][:, b.argsort()],
    ),
    "index select": lambda a, b, x: (a.index_select(1, torch.tensor([2, 1])), torch.take_along_dim(a, a.argsort(1), 1)),
    "matrices": lambda a, b, x: (a @ a.mT, a @ x.mT, x @ a.transpose(1, 2), torch.bmm(a, a.mT), a[0] @ b, b @ b, a @ b),
    "products": lambda a, b, x: (
        torch.einsum("nlf,f->nl", a, b), torch.einsum("nlf,nkf->nlk", a, x), torch.outer(b, b),
    ),
    "added products": lambda a, b, x: (torch.baddbmm(x[:, :, :3], a, a.mT), torch.addmm(b[:3], a[0], x[0].T)),
    "linear": lambda a, b, x: (F.linear(x, a[0], b[:3]), F.linear(a, x[0]), F.linear(a, a[1]), F.linear(b, a[0])),
    "losses": lambda a, b, x: (
        F.mse_loss(a, x), F.l1_loss(a, x, reduction="sum"), F.smooth_l1_loss(a, x, reduction="none"),
    ),
    "likelihood": lambda a, b, x: (
        F.nll_loss(a.flatten(0, 1).log_softmax(1), torch.tensor([0, 1, 2, 3, 0, 1])),
        F.binary_cross_entropy_with_logits(a, (x > 0).double()), F.kl_div(a.log_softmax(-1), x.softmax(-1)),
    ),
    "padding": lambda a, b, x: (F.pad(a, (1, 2)), F.pad(a, (1, 0, 0, 2), value=3.0), F.pad(a, (1, 1), mode="reflect")),
    "pools": lambda a, b, x: (
        F.avg_pool1d(a, 2), F.max_pool1d(a, 2), F.adaptive_avg_pool1d(a, 2), F.max_pool2d(a[None], 2),
    ),
    "pool indices": lambda a, b, x: F.max_pool2d(a[None], 2, return_indices=True),
    "one image": lambda a, b, x: (
        F.avg_pool2d(a, 2), F.interpolate(a, scale_factor=2), F.interpolate(a[None], size=(6, 6), mode="bilinear"),
    ),
    "attention": lambda a, b, x: (
        F.scaled_dot_product_attention(a, x, a), F.scaled_dot_product_attention(x, a, a, is_causal=True),
    ),
    "types": lambda a, b, x: (
        a.float(), a.to(torch.float32), x.to(a), (a > 0).to(x.dtype), b.type_as(x), x.type_as(b), a.long(),
    ),
    "made like": lambda a, b, x: (
        torch.zeros_like(a) + 1, torch.full_like(b, 2.0), a.new_ones(3), x.new_zeros(2) + b[0], a.detach(),
    ),
    "triangles": lambda a, b, x: (a.tril(), a.triu(1), torch.diagonal(a, dim1=1, dim2=2), torch.cdist(a, x)),
    "counted": lambda a, b, x: (a.count_nonzero(), (a > 0).sum(), (a > 0).any(1), (a > 0).all(), a.isnan().any()),
    "linear algebra": lambda a, b, x: (
        torch.linalg.norm(a), torch.linalg.vector_norm(a, dim=1), (a @ a.mT + 9 * torch.eye(3)).inverse(),
    ),
    "tuple of names": lambda a, b, x: (a.min(1).indices, torch.var_mean(a, 1), torch.broadcast_tensors(a, b)[1]),
    "written": written,
    "filled": filled,
    "new and filled": new_and_filled,
    "in place": in_place,
    "by shape": by_shape,
    "chosen": chosen,
    "looped": looped,
    "multiplied twice": lambda a, b, x: (a.T.T, a.real, a.data * 2, -a, +a, abs(a), a.dtype is x.dtype),
    "powers": lambda a, b, x: (
        a**2, a.pow(2), b ** x.abs(), torch.sqrt(b), b.rsqrt(), a.square(), b % 2, b.detach() // 0.3,
    ),
    "repeated": lambda a, b, x: (
        b.repeat_interleave(2), a.repeat_interleave(2, 1), b.tile(2), torch.meshgrid(b, b, indexing="ij"),
    ),
    "unfolded": lambda a, b, x: (a.unfold(1, 2, 1), F.unfold(a[None], 2), F.pixel_shuffle(a.reshape(1, 4, 2, 3), 2)),
    "one hot": lambda a, b, x: F.one_hot(a.argmax(-1), 4),
    "empty": lambda a, b, x: (a[:, :0].sum(), a[:0].reshape(0, 12), torch.cat([a[:0], a])),
}
# fmt: on


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore")
def test_operations_equal_each_variants_own(name: str) -> None:
    variants = built(lambda: Computes(OPERATIONS[name]))
    assert_equal_to_separate(variants, common(2, 3, 4), common(2, 3, 4, seed=6))


def test_nothing_in_the_table_needed_a_loop() -> None:
    variants = built(lambda: Computes(lambda a, b, x: (torch.cdist(a, x), a.diff(), a + b)))
    array = VariantArray(variants)
    array(common(2, 3, 4))
    assert array.report.how("") == "vmap"
    assert not array.report.unfused


class Doubled(torch.autograd.Function):
    """Sees what is in memory, and its last dimension by number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.ndim == 3
        return x * torch.arange(x.shape[0], dtype=x.dtype).view(-1, 1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def test_custom_autograd_functions_run_once_a_variant() -> None:
    variants = built(lambda: Computes(lambda a, b, x: Doubled.apply(a) + Doubled.apply(x)))
    array = assert_equal_to_separate(variants, common(2, 3, 4))
    (entry,) = array.report.unfused
    assert entry.operation == "Doubled"
    assert "test_arrays.py" in entry.why
    assert "custom autograd function" in entry.why


def test_operations_without_a_rule_run_once_a_variant_and_are_reported() -> None:
    variants = built(
        lambda: Computes(
            lambda a, b, x: torch.lstm_cell(
                a[0], (a[0, :, :1], a[1, :, :1]), a[1, 0].expand(4, 4).clone() + b, b.view(4, 1)
            )
        )
    )
    array = assert_equal_to_separate(variants, common(2, 3, 4))
    assert array.report.entries
    variants = built(lambda: Computes(lambda a, b, x: torch.nonzero(torch.ones_like(a)).double() * b[:3]))
    array = assert_equal_to_separate(variants, common(2, 3, 4))
    (entry,) = array.report.unfused
    assert entry.operation == "nonzero"
    assert "shape depends on values" in entry.why


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda a, b, x: a * a.sum().item(), r"test_arrays.py:\d+.*item reads numbers that differ"),
        (lambda a, b, x: a if a[0, 0, 0] > -1.2 else x, "bool reads numbers that differ"),
        (lambda a, b, x: a * float(b[0]), r"float reads numbers.*fuse_except"),
        (lambda a, b, x: x.add_(a), r"add_ writes the variants' numbers into a tensor that they all share.*clone"),
        (lambda a, b, x: x.__setitem__(0, a[0]), "__setitem__ writes the variants' numbers"),
        (lambda a, b, x: torch.zeros(2, 3, 4)[0].copy_(a[0]), "a view of a tensor that they all share"),
        (lambda a, b, x: a[a > 0], r"shapes \[\d+\], \[\d+\].*one shape.*fuse_except"),
        (lambda a, b, x: x.detach().add_(a), "add_ writes the variants' numbers"),
        (lambda a, b, x: setattr(torch.zeros(2), "data", a), "data = writes the variants' numbers"),
        (lambda a, b, x: torch.autograd.grad(a.sum(), b), "grad of an array would add up"),
        (lambda a, b, x: a.sum().backward(), "backward of an array would add up"),
        (lambda a, b, x: x.normal_(), "normal_ writes the variants' numbers"),
    ],
)
def test_what_differs_between_variants_is_refused_with_its_place(operation: Operation, message: str) -> None:
    array = VariantArray(built(lambda: Computes(operation)))
    x = common(2, 3, 4)
    before = x.clone()
    with pytest.raises(FusionError, match=message):
        array(x)
    assert torch.equal(x, before)
    assert x.shape == (2, 3, 4)
    for variant in array.variants:
        assert variant.a.shape == (2, 3, 4)  # whole again after the failure


def test_a_mistake_of_the_users_is_told_as_torch_tells_it() -> None:
    array = VariantArray(built(lambda: Computes(lambda a, b, x: a @ b[:3])))
    with pytest.raises(RuntimeError, match=r"size mismatch|mat1 and mat2|must match|incompatible"):
        array(common(2, 3, 4))
    array = VariantArray(built(lambda: Computes(lambda a, b, x: F.conv1d(x, a))))
    with pytest.raises(RuntimeError, match=r"weight of size \[2, 3, 4\], expected input\[2, 5, 4\]"):
        array(common(2, 5, 4))
    array = VariantArray(built(lambda: Computes(lambda a, b, x: a.view(5, 5))))
    with pytest.raises(RuntimeError, match=r"shape '\[5, 5\]' is invalid for input of size 24"):
        array(common(2, 3, 4))


def test_a_view_that_is_a_copy_must_not_be_written_to() -> None:
    def operation(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        images = F.conv2d(x[:, None], a[:, None, :2, :2])
        images.view(-1).mul_(2)
        return images

    array = VariantArray(built(lambda: Computes(operation)))
    with pytest.raises(FusionError, match=r"writes through `.view\(\)`"):
        array(common(2, 3, 4))


def test_shared_tensors_stay_shared() -> None:
    seen: list[Tensor] = []

    def operation(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones(3, 3).triu(1).bool()
        seen.extend((mask, x * 2))
        return a @ a.mT + mask

    array = VariantArray(built(lambda: Computes(operation)))
    array(common(2, 3, 4))
    assert [tensor.shape for tensor in seen] == [(3, 3), (2, 3, 4)]


def test_hooks_on_tensors_see_one_variants_gradient() -> None:
    seen: list[tuple[int, ...]] = []

    def operation(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        h = a * b
        h.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        h.register_hook(lambda gradient: gradient * gradient.sum())
        return h + x

    assert_equal_to_separate(built(lambda: Computes(operation)), common(2, 3, 4))
    assert seen == [(2, 3, 4)] * 6  # three variants as an array, and three by themselves
