"""What the sets of point clouds share: their settings, and a common scale."""

import torch
from torch import Tensor

from ..loading import SplitData, require_least

Sample = tuple[Tensor, ...]


class PointData(SplitData):
    """Batches of `(points, labels)`, points as [clouds, points, 3]; a subclass fills the three sets in `setup`."""

    for_batch_norm = True

    def __init__(self, *, num_classes: int, num_points: int, batch_size: int, num_workers: int) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        require_least(num_classes=(num_classes, 2), num_points=(num_points, 1))
        self.num_classes, self.num_points = num_classes, num_points


def in_unit_ball(points: Tensor) -> Tensor:
    """Clouds moved to their centre and scaled so that the farthest point lies at 1; [..., points, 3]."""
    centred = points - points.mean(dim=-2, keepdim=True)
    radius = centred.norm(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)
    scaled: Tensor = centred / radius.clamp_min(torch.finfo(points.dtype).tiny)
    return scaled


def turns(angles: Tensor, *, axis: int) -> Tensor:
    """Rotations about a coordinate axis, to be multiplied from the right; [clouds, 3, 3]."""
    first, second = (other for other in range(3) if other != axis)
    matrices = torch.zeros(len(angles), 3, 3)
    matrices[:, axis, axis] = 1
    matrices[:, first, first] = matrices[:, second, second] = angles.cos()
    matrices[:, first, second], matrices[:, second, first] = angles.sin(), -angles.sin()
    return matrices
