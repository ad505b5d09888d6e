"""Typed configurations of the image recipes and data sets; the classes they build stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class ImageClassifierConfig:
    """Keyword arguments of `classifier.ImageClassifier`."""

    _target_: str = "pl_pipe.recipes.vision.classifier.ImageClassifier"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    arch: str = MISSING
    """Network: a name in `networks.NETWORKS`."""
    num_classes: int = MISSING
    image_size: int = MISSING
    width: float = 1.0
    """Channel multiplier where the network has one; 1 is the published network."""
    dropout: float | None = None
    """Dropout before the classifier; null is the published network's."""
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    lr_policy: str = "step"
    """`constant`, `step`, `polynomial` or `exponential`; see recipes/optim.py for the formulas."""
    warmup_epochs: float = 0.0
    lr_gamma: float = 0.1
    lr_step_epochs: int = 30
    lr_power: float = 2.0


@dataclass
class ImageDataConfig:
    """Fields every image data set has."""

    about: DataAbout = field(default_factory=DataAbout)
    num_classes: int = 10
    image_size: int = 32
    batch_size: int = 32
    """Samples per process and step."""
    num_workers: int = 0
    """Loader processes per training process."""


@dataclass
class DigitsConfig(ImageDataConfig):
    """Keyword arguments of `digits.DigitsData`."""

    _target_: str = "pl_pipe.recipes.vision.digits.DigitsData"
    split_seed: int = 0
    """Which images are for training, validation and test."""


@dataclass
class SyntheticImagesConfig(ImageDataConfig):
    """Keyword arguments of `synthetic.SyntheticImages`."""

    _target_: str = "pl_pipe.recipes.vision.synthetic.SyntheticImages"
    channels: int = 3
    num_samples: int = 512
    num_val_samples: int = 128
    seed: int = 0


@dataclass
class ImageNetConfig(ImageDataConfig):
    """Keyword arguments of `imagenet.ImageNetData`."""

    _target_: str = "pl_pipe.recipes.vision.imagenet.ImageNetData"
    root: str | None = None
    """Folder that holds `train/<class>/*.jpg` and `val/<class>/*.jpg`."""


@dataclass
class Cifar10Config(ImageDataConfig):
    """Keyword arguments of `cifar10.Cifar10Data`."""

    _target_: str = "pl_pipe.recipes.vision.cifar10.Cifar10Data"
    root: str | None = None
    """Folder that holds `cifar-10-batches-py/`, or `train/<class>/` and `test/<class>/` images."""
    augment: bool = True
    """Random crops and flips in training."""
