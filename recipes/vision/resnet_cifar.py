"""The residual networks made for CIFAR-10 (He et al., "Deep Residual Learning", section 4.2); torchvision has none.

A 3×3 stem, three groups of basic blocks at c, 2c and 4c channels, and shortcuts without parameters (option A): where
the shape changes, the input is subsampled and padded with zero channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.padded = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.padded:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padded // 2, self.padded - self.padded // 2))
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """Stem, three groups of `blocks` basic blocks, global average, one dense layer."""

    def __init__(self, blocks: int, num_classes: int, channels: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.layer1 = self._group(channels, channels, blocks, stride=1)
        self.layer2 = self._group(channels, 2 * channels, blocks, stride=2)
        self.layer3 = self._group(2 * channels, 4 * channels, blocks, stride=2)
        self.fc = nn.Linear(4 * channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    @staticmethod
    def _group(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(channels_in, channels, stride)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.fc(x)
        return logits


def cifar_resnet(*, depth: int, num_classes: int, channels: int = 16) -> CifarResNet:
    """The network of `depth` = 6n + 2 weighted layers."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"a CIFAR ResNet has 6n+2 layers, got depth={depth}")
    return CifarResNet(blocks, num_classes, channels)
