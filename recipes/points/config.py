"""Typed configurations of PointNet and its data sets; the classes they build stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class PointClassifierConfig:
    """Keyword arguments of `classifier.PointClassifier`."""

    _target_: str = "pl_pipe.recipes.points.classifier.PointClassifier"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    num_classes: int = MISSING
    width: float = 1.0
    """Channel multiplier; 1 is the published network."""
    feature_transform: bool = True
    """The second T-Net, which transforms the features."""
    regularization: float = 0.001
    """What the feature transform's distance from rotations weighs in the loss."""
    dropout: float = 0.3
    optimizer: str = "adam"
    lr: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_step_epochs: int = 20
    """The learning rate is multiplied by `lr_gamma` every so many epochs."""
    lr_gamma: float = 0.5


@dataclass
class PointDataConfig:
    """Fields every set of point clouds has."""

    about: DataAbout = field(default_factory=DataAbout)
    num_classes: int = MISSING
    num_points: int = 128
    """Points of each cloud."""
    batch_size: int = 32
    """Clouds per process and step."""
    num_workers: int = 0
    """Loader processes per training process."""


@dataclass
class ShapesConfig(PointDataConfig):
    """Keyword arguments of `shapes.ShapesData`."""

    _target_: str = "pl_pipe.recipes.points.shapes.ShapesData"
    num_classes: int = 8
    num_samples: int = 1024
    num_val_samples: int = 256
    noise: float = 0.02
    """Deviation of each point from its surface; a shape's radius is 1."""
    seed: int = 0


@dataclass
class PointFilesConfig(PointDataConfig):
    """Keyword arguments of `point_files.PointFilesData`."""

    _target_: str = "pl_pipe.recipes.points.point_files.PointFilesData"
    root: str | None = None
    """Folder that holds `train/<class>/` and `test/<class>/`, or `<class>/train/` and `<class>/test/`, or `<class>/`
    alone."""
    val_fraction: float = 0.2
    """The part of each class that is for validation where the folder has no split of its own."""
    augment: bool = True
    """Turns about the vertical axis and jitter in training."""
    up_axis: int = 2
    """Which coordinate is height: 2 (z) for ModelNet's meshes, 1 (y) for ShapeNet's and the resampled ModelNet."""
