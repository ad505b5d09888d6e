"""The oracle of all tests of fusion: each variant by itself, as plain PyTorch runs it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pl_pipe.fusion import VariantArray

Build = Callable[[], nn.Module]
EXACT = 1e-12


def built(build: Build, seeds: Sequence[int] = (0, 1, 2), dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """One module a seed."""
    variants = []
    for seed in seeds:
        torch.manual_seed(seed)
        variants.append(build().to(dtype))
    return variants


def worth(out: Any) -> Tensor:
    """A number whose gradient reaches every element of an output, each by another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for value in tree_flatten(out)[0]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            weights = torch.linspace(-1.0, 2.0, value.numel(), dtype=torch.float64).reshape(value.shape)
            total = total + (value.double() * weights).sum()
    return total


def assert_close(found: Any, expected: Any, tolerance: float = EXACT, what: str = "") -> None:
    """Nested values alike: same structure, shapes, types and numbers."""
    mine, theirs = tree_flatten(found)[0], tree_flatten(expected)[0]
    assert len(mine) == len(theirs), what
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(other, Tensor):
            assert one == other, what
            continue
        assert one.shape == other.shape, f"{what}: {list(one.shape)}, expected {list(other.shape)}"
        assert one.dtype == other.dtype, f"{what}: {one.dtype}, expected {other.dtype}"
        if other.numel():
            scale = max(1.0, other.detach().double().abs().nan_to_num().max().item())
            torch.testing.assert_close(
                one.detach(),
                other.detach(),
                rtol=0,
                atol=tolerance * scale,
                equal_nan=True,
                msg=lambda text: f"{what}: {text}",
            )


def assert_state_close(
    found: nn.Module, expected: nn.Module, tolerance: float = EXACT, *, gradients: bool = True
) -> None:
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert_close(one, other, tolerance, name)
        if gradients:
            assert (one.grad is None) == (other.grad is None), f"gradient of {name}"
            if other.grad is not None:
                assert_close(one.grad, other.grad, tolerance, f"gradient of {name}")
    for (name, one), (_, other) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert_close(one, other, tolerance, name)


def assert_equal_to_separate(
    variants: Sequence[nn.Module],
    *batches: Any,
    tolerance: float = EXACT,
    array: VariantArray[nn.Module] | None = None,
    separate: Sequence[nn.Module] = (),
    call: Callable[..., Any] = lambda module, *args: module(*args),
    **settings: Any,
) -> VariantArray[nn.Module]:
    """Forward, backward and buffers of the array against the variants one by one, over several batches."""
    separate = separate or copy.deepcopy(list(variants))
    array = array or VariantArray(variants, **settings)
    for batch in batches:
        args = batch if isinstance(batch, tuple) else (batch,)
        found = call(array, *args)
        expected = [call(module, *(_part(value, j) for value in args)) for j, module in enumerate(separate)]
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, tolerance, f"output of variant {number}")
        total = sum(worth(one) for one in found)
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
            for other in expected:
                worth(other).backward()
    for module, reference in zip(variants, separate, strict=True):
        assert_state_close(module, reference, tolerance)
    return array


def _part(value: Any, variant: int) -> Any:
    """A test's own batch for each variant comes as an array; the reference takes its slice."""
    from pl_pipe.tensors.arrays import is_array

    return value[variant] if is_array(value) else value


def own(*shape: int, width: int = 3, seed: int = 5) -> Tensor:
    """A batch of its own for each variant."""
    from pl_pipe.tensors.arrays import mark

    generator = torch.Generator().manual_seed(seed)
    return mark(torch.randn(width, *shape, generator=generator, dtype=torch.float64))


def common(*shape: int, seed: int = 5) -> Tensor:
    """A batch that all variants see."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
