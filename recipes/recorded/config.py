"""Typed configurations of the recorded model and its data; the classes they build stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class RecordedModelConfig:
    """Keyword arguments of `module.RecordedModel`."""

    _target_: str = "pl_pipe.recipes.recorded.module.RecordedModel"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    profile: str | None = None
    """A PipeDream `graph.txt`, or a `profile.json` of `pl-pipe profile`."""
    dilation: float = 20.0
    """What all recorded times are multiplied by; links are to be slower by the same factor."""
    batch_size: int = MISSING
    """Samples of the batch that the profile was recorded with."""


@dataclass
class RecordedDataConfig:
    """Keyword arguments of `datamodule.RecordedData`."""

    _target_: str = "pl_pipe.recipes.recorded.datamodule.RecordedData"
    about: DataAbout = field(default_factory=DataAbout)
    batch_size: int = 128
    batches: int = 32
    """Mini-batches of an epoch, whatever the number of ranks."""
