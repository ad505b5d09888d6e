"""PointNet (Qi et al., CVPR'17): a function of each point, the greatest value over all of them, a classifier.

points ─► input T-Net ─► 64 ─► feature T-Net ─► 128 ─► 1024 ─► max over points ─► 512 ─► 256 ─► classes

Convolutions of width one are the function of each point, so that every layer is a plain module.
"""

# Shapes: N clouds, P points, C coordinates or channels, K the side of a T-Net's matrix.

import torch
from torch import Tensor, nn

POINT_CHANNELS = (64, 128, 1024)
DENSE_CHANNELS = (512, 256)


class TransformNet(nn.Module):
    """A T-Net: the matrix that turns each cloud, or each cloud's features, into a pose of its own choice."""

    def __init__(self, side: int, *, width: float = 1.0) -> None:
        super().__init__()
        self.side = side
        first, second, third = (scaled(channels, width) for channels in POINT_CHANNELS)
        dense1, dense2 = (scaled(channels, width) for channels in DENSE_CHANNELS)
        self.points = nn.Sequential(
            nn.Conv1d(side, first, 1), nn.BatchNorm1d(first), nn.ReLU(),
            nn.Conv1d(first, second, 1), nn.BatchNorm1d(second), nn.ReLU(),
            nn.Conv1d(second, third, 1), nn.BatchNorm1d(third), nn.ReLU(),
        )  # fmt: skip
        self.dense = nn.Sequential(
            nn.Linear(third, dense1), nn.BatchNorm1d(dense1), nn.ReLU(),
            nn.Linear(dense1, dense2), nn.BatchNorm1d(dense2), nn.ReLU(),
            nn.Linear(dense2, side * side),
        )  # fmt: skip
        last = self.dense[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)  # training starts from the identity, as the authors' does
        with torch.no_grad():
            last.bias.copy_(torch.eye(side).flatten())

    def forward(self, points_NCP: Tensor) -> Tensor:
        features = self.points(points_NCP).max(dim=2).values
        matrix_NKK: Tensor = self.dense(features).view(-1, self.side, self.side)
        return matrix_NKK


class PointNet(nn.Module):
    """The classification network; `width` scales all of its inner channels, and 1 is the published one."""

    def __init__(
        self, num_classes: int, *, width: float = 1.0, feature_transform: bool = True, dropout: float = 0.3
    ) -> None:
        super().__init__()
        first, second, third = (scaled(channels, width) for channels in POINT_CHANNELS)
        dense1, dense2 = (scaled(channels, width) for channels in DENSE_CHANNELS)
        self.input_transform = TransformNet(3, width=width)
        self.early = nn.Sequential(nn.Conv1d(3, first, 1), nn.BatchNorm1d(first), nn.ReLU())
        self.feature_transform = TransformNet(first, width=width) if feature_transform else None
        self.late = nn.Sequential(
            nn.Conv1d(first, second, 1), nn.BatchNorm1d(second), nn.ReLU(),
            nn.Conv1d(second, third, 1), nn.BatchNorm1d(third),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(third, dense1), nn.BatchNorm1d(dense1), nn.ReLU(),
            nn.Linear(dense1, dense2), nn.Dropout(dropout), nn.BatchNorm1d(dense2), nn.ReLU(),
            nn.Linear(dense2, num_classes),
        )  # fmt: skip

    def forward(self, points_NPC: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and the feature transform, which the loss keeps close to a rotation."""
        points_NCP = points_NPC.transpose(1, 2)
        turn_NCC = self.input_transform(points_NCP)
        features = self.early(torch.bmm(points_NPC, turn_NCC).transpose(1, 2))
        transform_NKK = None
        if self.feature_transform is not None:
            transform_NKK = self.feature_transform(features)
            features = torch.bmm(features.transpose(1, 2), transform_NKK).transpose(1, 2)
        features = self.late(features).max(dim=2).values
        return self.classifier(features), transform_NKK


def distance_from_rotations(matrix_NKK: Tensor) -> Tensor:
    """The paper's regulariser, ‖A Aᵀ − 1‖² in the mean over clouds."""
    product = torch.bmm(matrix_NKK, matrix_NKK.transpose(1, 2))
    identity = torch.eye(matrix_NKK.shape[1], dtype=matrix_NKK.dtype, device=matrix_NKK.device)
    return (product - identity).square().sum(dim=(1, 2)).mean()


def scaled(channels: int, width: float) -> int:
    return max(8, round(channels * width))
