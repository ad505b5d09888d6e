"""Typed configurations of DCGAN, of its discriminator alone and of their images; the classes stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class RealFakeConfig:
    """Keyword arguments of `real_fake.RealFakeClassifier`."""

    _target_: str = "pl_pipe.recipes.generative.real_fake.RealFakeClassifier"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    image_size: int = MISSING
    width: float = 1.0
    """Channel multiplier; 1 is the published network."""
    channels: int = 3
    lr: float = 2e-4
    beta1: float = 0.5
    """Adam's first decay; the paper found 0.9 to be unstable."""


@dataclass
class DcganConfig(RealFakeConfig):
    """Keyword arguments of `dcgan.Dcgan`."""

    _target_: str = "pl_pipe.recipes.generative.dcgan.Dcgan"
    latent: int = 100
    """Numbers of noise that an image is made of."""


@dataclass
class UnlabelledImagesConfig:
    """Fields every set of unlabelled images has."""

    about: DataAbout = field(default_factory=DataAbout)
    image_size: int = 64
    batch_size: int = 64
    """Images per process and step."""
    num_workers: int = 0
    """Loader processes per training process."""
    fakes: bool = False
    """Every second image is shown as a fake, and batches say which; recipe=dcgan_d sets it."""


@dataclass
class DrawingsConfig(UnlabelledImagesConfig):
    """Keyword arguments of `drawings.DrawingsData`."""

    _target_: str = "pl_pipe.recipes.generative.drawings.DrawingsData"
    num_samples: int = 1024
    num_val_samples: int = 256
    seed: int = 0


@dataclass
class ImageFilesConfig(UnlabelledImagesConfig):
    """Keyword arguments of `image_files.ImageFilesData`."""

    _target_: str = "pl_pipe.recipes.generative.image_files.ImageFilesData"
    root: str | None = None
    """Folder that holds images, in it or in folders below it."""
    val_fraction: float = 0.05
