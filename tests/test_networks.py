"""The networks: torchvision's own at full size, sensible ones at small sizes."""

import pytest
import torch
import torchvision

from pl_pipe.errors import ConfigError
from pl_pipe.recipes.vision.networks import NETWORKS, build_network
from pl_pipe.recipes.vision.resnet_cifar import cifar_resnet

TORCHVISION = sorted(set(NETWORKS) - {"resnet56"})


@pytest.mark.parametrize("arch", TORCHVISION)
def test_full_size_is_torchvisions(arch: str) -> None:
    with torch.device("meta"):
        ours = build_network(arch, num_classes=1000, image_size=224)
        theirs = torchvision.models.get_model(arch, weights=None, num_classes=1000)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("arch", NETWORKS)
def test_least_size_works_and_below_is_refused(arch: str) -> None:
    least = NETWORKS[arch][1]
    network = build_network(arch, num_classes=3, image_size=least).eval()
    assert network(torch.zeros(2, 3, least, least)).shape == (2, 3)
    with pytest.raises(ConfigError, match=f"set data.image_size={least}"):
        build_network(arch, num_classes=3, image_size=least - 1)


def test_resnet56_is_the_papers() -> None:
    """He et al. count 0.85 million parameters; option A shortcuts have none."""
    network = cifar_resnet(depth=56, num_classes=10)
    weighted = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 56
    assert sum(p.numel() for p in network.parameters()) == 853_018


@pytest.mark.parametrize(("arch", "least"), [("vgg16", 32), ("alexnet", 64)])
def test_small_networks_pass_on_a_signal(arch: str, least: int) -> None:
    """Logits of different images differ at the start; with torchvision's own start they would be equal to 1e-3."""
    torch.manual_seed(0)
    network = build_network(arch, num_classes=10, image_size=least, width=0.25 if arch == "vgg16" else 1.0).eval()
    with torch.no_grad():
        logits = network(torch.randn(8, 3, least, least))
    assert logits.std(dim=0).mean() > 0.05


@pytest.mark.parametrize("arch", ["alexnet", "resnet18", "resnet50"])
def test_width_is_refused_where_there_is_one_width(arch: str) -> None:
    with pytest.raises(ConfigError, match=r"one width only, got recipe.width=0.5; set recipe.width=1"):
        build_network(arch, num_classes=10, image_size=224, width=0.5)


@pytest.mark.parametrize("arch", ["resnet18", "resnet56"])
def test_dropout_is_refused_where_there_is_none(arch: str) -> None:
    with pytest.raises(ConfigError, match=r"no dropout, got recipe.dropout=0.1"):
        build_network(arch, num_classes=10, image_size=64, dropout=0.1)


def test_unknown_network_and_width() -> None:
    with pytest.raises(ConfigError, match=r"recipe.arch=vgg99 is unknown; choose one of vgg16, alexnet"):
        build_network("vgg99", num_classes=10, image_size=64)
    with pytest.raises(ConfigError, match=r"width=0 is not positive"):
        build_network("vgg16", num_classes=10, image_size=64, width=0)
