"""The networks by name: torchvision's where it has them, fitted to the image size.

VGG and AlexNet end in dense layers made for 224 pixels (7×7 and 6×6 maps). Below that size the map is pooled to one
value a channel and the dense layers are as wide as the last convolution, started by He's rule: with torchvision's fixed
deviation of 0.01 such narrow layers would pass on almost no signal. At 224 pixels and width 1 every network here is
torchvision's own.
"""

from collections.abc import Callable

from torch import nn
from torchvision import models
from torchvision.models.vgg import cfgs as vgg_layouts
from torchvision.models.vgg import make_layers

from pl_pipe.errors import ConfigError

from .resnet_cifar import cifar_resnet

FULL_SIZE = 224


def build_network(
    arch: str, *, num_classes: int, image_size: int, width: float = 1.0, dropout: float | None = None
) -> nn.Module:
    """The network called `arch` for square RGB images of side `image_size`."""
    if arch not in NETWORKS:
        raise ConfigError(f"recipe.arch={arch} is unknown; choose one of {', '.join(NETWORKS)}")
    if width <= 0:
        raise ConfigError(f"recipe.width={width} is not positive; 1 is the published network")
    build, least_size = NETWORKS[arch]
    if image_size < least_size:
        raise ConfigError(
            f"{arch} takes images of at least {least_size} pixels, got {image_size}; set data.image_size={least_size}"
        )
    return build(num_classes=num_classes, image_size=image_size, width=width, dropout=dropout)


def _vgg16(*, num_classes: int, image_size: int, width: float, dropout: float | None) -> nn.Module:
    rate = 0.5 if dropout is None else dropout
    if image_size >= FULL_SIZE and width == 1:
        return _typed(models.vgg16(num_classes=num_classes, dropout=rate))
    layout = [size if size == "M" else _scaled(int(size), width) for size in vgg_layouts["D"]]
    features = make_layers(layout)
    network = models.VGG(features, num_classes=num_classes, init_weights=False)
    return _fit_head(network, channels=int(layout[-2]), num_classes=num_classes, dropout=rate)


def _alexnet(*, num_classes: int, image_size: int, width: float, dropout: float | None) -> nn.Module:
    _refuse_width("alexnet", width)
    rate = 0.5 if dropout is None else dropout
    network = models.AlexNet(num_classes=num_classes, dropout=rate)
    if image_size >= FULL_SIZE:
        return _typed(network)
    return _fit_head(network, channels=256, num_classes=num_classes, dropout=rate)


def _torchvision(name: str, *, scales: bool = False, drops: bool = False) -> Callable[..., nn.Module]:
    def build(*, num_classes: int, image_size: int, width: float, dropout: float | None) -> nn.Module:  # noqa: ARG001
        extra: dict[str, float] = {}
        if scales:
            extra["width_mult"] = width
        else:
            _refuse_width(name, width)
        if drops and dropout is not None:
            extra["dropout"] = dropout
        elif dropout is not None:
            raise ConfigError(f"{name} has no dropout, got recipe.dropout={dropout}; leave it null")
        return _typed(models.get_model(name, weights=None, num_classes=num_classes, **extra))

    return build


def _resnet56(*, num_classes: int, image_size: int, width: float, dropout: float | None) -> nn.Module:  # noqa: ARG001
    if dropout is not None:
        raise ConfigError(f"resnet56 has no dropout, got recipe.dropout={dropout}; leave it null")
    return cifar_resnet(depth=56, num_classes=num_classes, channels=_scaled(16, width))


def _refuse_width(arch: str, width: float) -> None:
    if width != 1:
        raise ConfigError(f"{arch} comes in one width only, got recipe.width={width}; set recipe.width=1")


def _scaled(channels: int, width: float) -> int:
    return max(8, round(channels * width))


def _fit_head(network: nn.Module, *, channels: int, num_classes: int, dropout: float) -> nn.Module:
    """Gives a VGG or AlexNet dense layers for a single value a channel, and starts all weights by He's rule."""
    network.avgpool = nn.AdaptiveAvgPool2d(1)
    network.classifier = nn.Sequential(
        nn.Linear(channels, channels),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(channels, channels),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(channels, num_classes),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


def _typed(network: object) -> nn.Module:
    assert isinstance(network, nn.Module)
    return network


# name -> (builder, least image side)
NETWORKS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "vgg16": (_vgg16, 32),
    "alexnet": (_alexnet, 63),
    "resnet18": (_torchvision("resnet18"), 8),
    "resnet50": (_torchvision("resnet50"), 8),
    "mobilenet_v2": (_torchvision("mobilenet_v2", scales=True, drops=True), 8),
    "mobilenet_v3_small": (_torchvision("mobilenet_v3_small", scales=True, drops=True), 8),
    "mobilenet_v3_large": (_torchvision("mobilenet_v3_large", scales=True, drops=True), 8),
    "resnet56": (_resnet56, 8),
}
