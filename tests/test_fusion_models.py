"""Whole networks trained as an array against separate trainings, each with its own optimizer and schedule."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, OneCycleLR, StepLR

from pl_pipe.fusion import VariantArray
from tests import fusion_models as models
from tests.fusion_cases import assert_state_close, built

TRAINED = 1e-9
Recipe = tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, Tensor]]]


def images(size: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(samples, 3, size, size, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 10, (samples,), generator=generator)

    return batch


def sentences(step: int, samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 20, (samples, 8), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def points(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    cloud = torch.randn(samples, 3, 12, generator=generator, dtype=torch.float64)
    return cloud, torch.randint(0, 10, (samples,), generator=generator)


QUICK: dict[str, Recipe] = {
    "residual": (models.Residual, images(8)),
    "language model": (models.LanguageModel, sentences),
    "lstm": (models.Recurrent, sentences),
    "pointnet": (models.PointNet, points),
    "dcgan discriminator": (models.Discriminator, images(32)),
    "vit": (models.small_vit, images(32)),
    "swin": (models.small_swin, images(16)),
    "convnext": (models.small_convnext, images(16)),
    "squeezenet1_1": (lambda: models.vision("squeezenet1_1"), images(32)),
}
LONGER = ("language model", "lstm", "squeezenet1_1", "convnext")
STEPS = {"squeezenet1_1": 2, "swin": 4, "vit": 6, "convnext": 6}
LARGE: dict[str, Recipe] = {
    name: (lambda name=name, settings=settings: models.vision(name, **settings), images(size))  # type: ignore[misc]
    for name, size, settings in (
        ("resnet18", 32, {}),
        ("mobilenet_v2", 64, {}),  # at 32, batch norm sees four numbers at the end, and enlarges rounding
        ("mobilenet_v3_small", 32, {}),
        ("shufflenet_v2_x0_5", 32, {}),
    )
}


def optimizers_of(variants: Sequence[nn.Module]) -> list[tuple[Optimizer, LRScheduler]]:
    """Another optimizer, rate, weight decay and schedule for each variant.

    Attention's key bias has no gradient but rounding: Adam's usual eps would make updates of it."""
    first, second, third = (list(variant.parameters()) for variant in variants)
    sgd = SGD(first, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    adam = AdamW(second, lr=3e-3, weight_decay=0.05, eps=1e-4)
    groups: list[dict[str, Any]] = [{"params": third[::2], "lr": 1e-3}, {"params": third[1::2], "weight_decay": 1e-3}]
    other = Adam(groups, lr=2e-3, eps=1e-4)
    return [(sgd, CosineAnnealingLR(sgd, 20)), (adam, StepLR(adam, 3, 0.5)), (other, ExponentialLR(other, 0.9))]


def train(
    run: Callable[[Tensor], list[Tensor]],
    variants: Sequence[nn.Module],
    batch: Callable[[int, int], tuple[Tensor, Tensor]],
    steps: int,
) -> list[list[float]]:
    """The losses of each step. A smaller last batch ends every epoch of four; every fifth step accumulates."""
    optimizers = optimizers_of(variants)
    history = []
    for step in range(steps):
        x, y = batch(step, 3 if step % 4 == 3 else 4)
        losses = [F.cross_entropy(out.flatten(0, -2), y.flatten()) for out in run(x)]
        torch.stack(losses).sum().backward()
        history.append([loss.item() for loss in losses])
        if step % 5 == 4:
            continue
        for variant, (optimizer, schedule) in zip(variants, optimizers, strict=True):
            nn.utils.clip_grad_norm_(variant.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return history


def assert_trained_alike(recipe: Recipe, steps: int) -> VariantArray[nn.Module]:
    build, batch = recipe
    variants = built(build)
    separate = copy.deepcopy(variants)
    array = VariantArray(variants)
    found = train(array, variants, batch, steps)
    expected = train(lambda x: [variant(x) for variant in separate], separate, batch, steps)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=TRAINED)
    for variant, reference in zip(variants, separate, strict=True):
        assert_state_close(variant, reference, TRAINED)
    return array


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in QUICK]
)
def test_twenty_steps_equal_separate_trainings(name: str) -> None:
    array = assert_trained_alike(QUICK[name], steps=STEPS.get(name, 20))
    assert not array.report.unfused
    assert "vmap" not in {entry.how for entry in array.report.entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_torchvisions_networks_equal_separate_trainings(name: str) -> None:
    array = assert_trained_alike(LARGE[name], steps=2)
    assert not array.report.unfused


def test_evaluation_equals_the_variants_own() -> None:
    variants = built(models.Residual)
    array = VariantArray(variants)
    train(array, variants, images(8), 3)
    array.eval()
    x, _ = images(8)(99, 5)
    with torch.no_grad():
        for found, variant in zip(array(x), variants, strict=True):
            torch.testing.assert_close(found, variant(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", [SGD, Adam, RMSprop])
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_write_into_the_array(dtype: torch.dtype, optimizer: Any, foreach: bool) -> None:
    variants = built(models.Residual, dtype=dtype)
    array = VariantArray(variants)
    optimizers = [
        optimizer(variant.parameters(), lr=0.1 * (j + 1), foreach=foreach) for j, variant in enumerate(variants)
    ]
    x, _ = images(8)(0, 4)
    before = array(x.to(dtype))
    torch.stack([out.square().sum() for out in before]).sum().backward()
    for one in optimizers:
        one.step()
    after = array(x.to(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    for first, second, variant in zip(before, after, variants, strict=True):
        assert not torch.allclose(first, second)
        torch.testing.assert_close(second, variant(x.to(dtype)), rtol=tolerance, atol=tolerance)


def test_one_cycle_schedules_and_one_variant() -> None:
    variants = built(models.Residual, seeds=[3])
    separate = copy.deepcopy(variants)
    array = VariantArray(variants)
    for modules, run in ((variants, array), (separate, lambda x: [separate[0](x)])):
        optimizer = SGD(modules[0].parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=4)
        for step in range(3):
            x, y = images(8)(step, 4)
            F.cross_entropy(run(x)[0], y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert_state_close(variants[0], separate[0], TRAINED)
