"""DCGAN's two networks (Radford et al., ICLR'16), for square images whose side is a power of two.

generator      noise ─► 4×4 ─► 8×8 ─► … ─► image        each transposed convolution: twice the side, half the channels
discriminator  image ─► … ─► 8×8 ─► 4×4 ─► one logit    the same, backwards
"""

from torch import Tensor, nn

from pl_pipe.errors import ConfigError

SMALLEST = 4
LEAST_SIZE = 16
CHANNELS = 64


class Generator(nn.Module):
    """From noise to images in −1..1."""

    def __init__(self, image_size: int, *, latent: int = 100, width: float = 1.0, channels: int = 3) -> None:
        super().__init__()
        self.latent = latent
        sizes = [scaled(CHANNELS * 2**k, width) for k in reversed(range(halvings(image_size)))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, sizes[0], SMALLEST, bias=False)]
        for before, after in zip(sizes, [*sizes[1:], channels], strict=True):
            layers += [nn.BatchNorm2d(before), nn.ReLU(inplace=True)]
            layers.append(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False))
        self.layers = nn.Sequential(*layers, nn.Tanh())
        start_small(self)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.layers(noise.view(-1, self.latent, 1, 1))
        return images


class Discriminator(nn.Module):
    """From images to a logit each: above 0 is real."""

    def __init__(self, image_size: int, *, width: float = 1.0, channels: int = 3) -> None:
        super().__init__()
        sizes = [scaled(CHANNELS * 2**k, width) for k in range(halvings(image_size))]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(zip([channels, *sizes], sizes, strict=False)):
            layers.append(nn.Conv2d(before, after, 4, stride=2, padding=1, bias=False))
            if number:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
        self.layers = nn.Sequential(*layers, nn.Conv2d(sizes[-1], 1, SMALLEST, bias=False))
        start_small(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images).flatten()
        return logits


def halvings(image_size: int) -> int:
    """How often the side is halved to get to 4; refuses sizes for which that does not come out even."""
    count = image_size.bit_length() - SMALLEST.bit_length()
    if image_size < LEAST_SIZE or image_size != SMALLEST << count:
        raise ConfigError(
            f"data.image_size={image_size}, but DCGAN doubles from 4 pixels up; set data.image_size to 16, 32, 64 …"
        )
    return count


def start_small(network: nn.Module) -> None:
    """The paper's start: all weights from a normal distribution of deviation 0.02."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)


def scaled(channels: int, width: float) -> int:
    return max(4, round(channels * width))
