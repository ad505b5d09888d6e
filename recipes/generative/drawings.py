"""The embedded default: small drawings, each a bright disc over a ground that grows darker towards one side."""

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .datamodule import UnlabelledImages


class DrawingsData(UnlabelledImages):
    """`num_samples` drawings, the same on every rank and in every run of one seed."""

    def __init__(
        self,
        *,
        image_size: int = 32,
        batch_size: int = 64,
        num_workers: int = 0,
        fakes: bool = False,
        num_samples: int = 1024,
        num_val_samples: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(image_size=image_size, batch_size=batch_size, num_workers=num_workers, fakes=fakes)
        if min(num_samples, num_val_samples) < 2:
            raise ConfigError(
                f"data=drawings needs at least two images of each kind, got data.num_samples={num_samples}, "
                f"data.num_val_samples={num_val_samples}"
            )
        self.sizes, self.seed = (num_samples, num_val_samples, num_val_samples), seed

    @override
    def setup(self, stage: str) -> None:
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(draw(size, side=self.image_size, seed=self.seed * 3 + split))
            for split, size in enumerate(self.sizes)
        )


def draw(samples: int, *, side: int, seed: int) -> Tensor:
    """RGB drawings in −1..1; [samples, 3, side, side]."""
    random = Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(samples, *shape).uniform_(low, high, generator=random)

    places = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(places, places, indexing="ij")
    angle = uniform(0, 2 * torch.pi, 1, 1, 1)
    slope = 0.5 * (angle.cos() * x + angle.sin() * y)
    ground = uniform(-0.6, 0.2, 3, 1, 1) - 0.5 * slope
    across, down, radius = uniform(-0.4, 0.4, 1, 1, 1), uniform(-0.4, 0.4, 1, 1, 1), uniform(0.25, 0.5, 1, 1, 1)
    distance = ((x - across).square() + (y - down).square()).sqrt()
    covered = ((radius - distance) * side / 4 + 0.5).clamp(0, 1)  # an edge of a few pixels
    disc = uniform(0.3, 1.0, 3, 1, 1)
    return ground.lerp(disc.expand_as(ground), covered).clamp(-1, 1)
