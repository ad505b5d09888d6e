"""The six workloads of HFTA as LightningModules: PointNet, DCGAN-D, ResNet-18, MobileNetV3, Transformer-LM, BERT.

Data lies on the device, so that steps are timed and not loaders. Models of images have channels last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import IterableDataset

VOCABULARY = 30_000
LENGTH = 32
TENSOR_CORES = torch.channels_last


class ResNet18(nn.Module):
    """For 32 x 32 images: a small stem, no pooling after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)
        self.net.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.net.maxpool = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(3, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 1024, 1)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm1d(64), nn.BatchNorm1d(128), nn.BatchNorm1d(1024)
        self.head = nn.Sequential(
            *(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(self.norm3(self.conv3(x)).max(2).values)  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for place, out in enumerate((64, 128, 256, 512)):
            layers.append(nn.Conv2d(channels, out, 4, 2, 1, bias=False))
            layers.extend([nn.BatchNorm2d(out)] if place else [])
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            channels = out
        self.net = nn.Sequential(*layers, nn.Conv2d(512, 1, 4, 1, 0, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = self.norm1(x + self.out(attended.transpose(1, 2).reshape(x.shape)))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int, masked: bool, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads, inner, not masked) for _ in range(layers)))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) if masked else nn.Identity()
        self.out = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.head(self.layers(self.words(words) + self.places))).flatten(0, 1)  # type: ignore[no-any-return]


def mobilenet() -> nn.Module:
    net = torchvision.models.mobilenet_v3_small(num_classes=10)
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return net


@dataclass(frozen=True)
class Workload:
    batch: int
    channels_last: bool = False


WORKLOADS = {
    "pointnet": Workload(32),
    "dcgan_d": Workload(128, channels_last=True),
    "resnet18": Workload(128, channels_last=True),
    "mobilenet": Workload(1024, channels_last=True),
    "transformer": Workload(32),
    "bert": Workload(32),
}


def build(name: str, *, small: bool = False) -> nn.Module:
    """`small` is for machines without a GPU, to see that all works."""
    words = 500 if small else VOCABULARY
    if name == "pointnet":
        return PointNet()
    if name == "dcgan_d":
        return Discriminator()
    if name == "resnet18":
        return ResNet18()
    if name == "mobilenet":
        return mobilenet()
    if name == "transformer":
        return LanguageModel(2, 128, 2, 128, False, words)
    return LanguageModel(1 if small else 8, 512, 8, 2048, True, words)


def batch_of(name: str, device: torch.device | str, *, small: bool = False) -> tuple[Tensor, Tensor]:
    samples, words = (4, 500) if small else (WORKLOADS[name].batch, VOCABULARY)
    if name == "pointnet":
        return torch.randn(samples, 3, 64 if small else 2500, device=device), _labels(16, samples, device)
    if name in ("transformer", "bert"):
        return _labels(words, (samples, LENGTH), device), _labels(words, samples * LENGTH, device)
    size = 64 if name == "dcgan_d" else 32
    x = torch.randn(samples, 3, size, size, device=device).to(memory_format=TENSOR_CORES)
    return x, _labels(2, (samples, 1), device).float() if name == "dcgan_d" else _labels(10, samples, device)


def loss_of(name: str, out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.float(), y) if name == "dcgan_d" else F.cross_entropy(out, y)


class Trained(L.LightningModule):
    """A workload as a user would write it."""

    def __init__(self, name: str, lr: float = 1e-3, small: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build(name, small=small)
        if WORKLOADS[name].channels_last:
            self.net.to(memory_format=TENSOR_CORES)  # type: ignore[call-overload]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = loss_of(self.hparams["name"], self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


class Resident(IterableDataset[Any]):
    """Batches that lie on the device."""

    def __init__(self, name: str, device: torch.device | str, steps: int, *, small: bool = False) -> None:
        self._batches = [batch_of(name, device, small=small) for _ in range(2)]
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._steps):
            yield self._batches[step % len(self._batches)]


def _labels(classes: int, shape: int | tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.randint(0, classes, (shape,) if isinstance(shape, int) else shape, device=device)
