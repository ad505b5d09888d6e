"""The embedded default: eight bodies with points drawn on their surfaces, each stretched, turned and noisy."""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .datamodule import PointData, in_unit_ball, turns

TAU = 2 * math.pi
STRETCH = (0.7, 1.3)


class ShapesData(PointData):
    """`num_samples` clouds of the eight bodies in turn, the same on every rank and in every run of one seed."""

    def __init__(
        self,
        *,
        num_classes: int = 8,
        num_points: int = 128,
        batch_size: int = 32,
        num_workers: int = 0,
        num_samples: int = 1024,
        num_val_samples: int = 256,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        super().__init__(num_classes=num_classes, num_points=num_points, batch_size=batch_size, num_workers=num_workers)
        least = len(SHAPES)
        if num_classes < least:
            raise ConfigError(
                f"data.num_classes={num_classes}, but there are {least} shapes; set data.num_classes={least}"
            )
        if min(num_samples, num_val_samples) < 1 or noise < 0:
            raise ConfigError(
                f"data=shapes needs at least one cloud and no negative noise, got data.num_samples={num_samples}, "
                f"data.num_val_samples={num_val_samples}, data.noise={noise}"
            )
        self.sizes, self.noise, self.seed = (num_samples, num_val_samples, num_val_samples), noise, seed

    @override
    def setup(self, stage: str) -> None:
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(*draw_shapes(size, num_points=self.num_points, noise=self.noise, seed=self.seed * 3 + split))
            for split, size in enumerate(self.sizes)
        )


def draw_shapes(samples: int, *, num_points: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Clouds and their labels; sample n shows body n modulo 8."""
    random = Generator().manual_seed(seed)
    labels = torch.arange(samples) % len(SHAPES)
    clouds = torch.empty(samples, num_points, 3)
    for label, draw in enumerate(SHAPES.values()):
        members = labels == label
        count = int(members.sum())
        shape = (count, num_points)
        first, second, third = (torch.rand(shape, generator=random) for _ in range(3))
        stretch = torch.empty(count, 1, 3).uniform_(*STRETCH, generator=random)
        clouds[members] = draw(first, second, third) * stretch
    angles = torch.rand(samples, generator=random) * TAU
    clouds = torch.bmm(clouds, turns(angles, axis=2))
    clouds += noise * torch.randn(clouds.shape, generator=random)
    return in_unit_ball(clouds), labels


# Each takes three uniform numbers a point, [clouds, points], and gives points on its surface.


def _sphere(u: Tensor, v: Tensor, _: Tensor) -> Tensor:
    height = 2 * u - 1
    radius = (1 - height.square()).clamp_min(0).sqrt()
    return _around(radius, v, height)


def _box(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    face = (w * 6).long().clamp_max(5)
    side = (face % 2).to(u.dtype) * 2 - 1
    own = torch.stack([side, 2 * u - 1, 2 * v - 1], dim=-1)
    axis = face // 2
    order = torch.stack([(torch.arange(3) - shift) % 3 for shift in range(3)])  # which entry each coordinate takes
    return own.gather(-1, order[axis])


def _cylinder(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    wall = w < 2 / 3
    lid = torch.where(w < 5 / 6, 1.0, -1.0)
    return _around(torch.where(wall, torch.ones_like(u), u.sqrt()), v, torch.where(wall, 2 * u - 1, lid))


def _cone(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    radius = u.sqrt()
    return _around(radius, v, torch.where(w < 0.7, 1 - 2 * radius, torch.full_like(u, -1)))


def _torus(u: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return _around(1 + 0.35 * (TAU * u).cos(), v, 0.35 * (TAU * u).sin())


def _disc(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return _around(u.sqrt(), v, 0.1 * (w - 0.5))


def _helix(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return _around(1 + 0.1 * (w - 0.5), 2 * u % 1, 2 * u - 1 + 0.1 * (v - 0.5))


def _cross(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Three rods along the axes."""
    rod = (w * 3).long().clamp_max(2)
    along = torch.nn.functional.one_hot(rod, 3).to(u.dtype) * (2 * u - 1).unsqueeze(-1)
    return along + 0.1 * _around(torch.ones_like(v), v, torch.zeros_like(v))


def _around(radius: Tensor, turn: Tensor, height: Tensor) -> Tensor:
    """Points at a distance from the vertical axis, so many turns around it."""
    return torch.stack([radius * (TAU * turn).cos(), radius * (TAU * turn).sin(), height], dim=-1)


SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sphere": _sphere,
    "box": _box,
    "cylinder": _cylinder,
    "cone": _cone,
    "torus": _torus,
    "disc": _disc,
    "helix": _helix,
    "cross": _cross,
}
