"""Typed configurations of `pl-pipe data prepare`; the classes they build stand beside this file."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ..about import DataAbout


@dataclass
class SourceConfig:
    """A file that a data set is made of; see `source.Source`."""

    file: str = MISSING
    url: str | None = None
    page: str | None = None
    """Where people get it, if a program cannot."""
    md5: str | None = None
    sha256: str | None = None
    sums_url: str | None = None
    """A list of md5 sums on the server, for files that change."""
    size_bytes: int | None = None


@dataclass
class PreparationConfig:
    """Fields every preparation has."""

    about: DataAbout = field(default_factory=DataAbout)
    sources: list[SourceConfig] = field(default_factory=list)
    mirror: str | None = None
    """Another server: files are fetched from `mirror/<file>`."""
    offline: bool = False
    """Nothing is fetched; what is missing is listed."""
    verify: bool = True
    """Whether sums are checked."""
    timeout_s: float = 30.0
    """Without a sign of the server."""
    retries: int = 4
    """How often a download that does not get on is tried again."""
    pause_s: float = 2.0
    """Before the first repetition; each further one waits twice as long."""


@dataclass
class HookConfig:
    """A step that another package brings; see `hook.py`."""

    hook: str | None = None
    """The path of a function; null leaves the step out."""
    settings: Any = None
    """Its keyword arguments."""


@dataclass
class Cifar10PreparationConfig(PreparationConfig):
    _target_: str = "pl_pipe.recipes.preparation.cifar10.Cifar10Preparation"


@dataclass
class SquadPreparationConfig(PreparationConfig):
    _target_: str = "pl_pipe.recipes.preparation.squad.SquadPreparation"
    vocabulary: HookConfig = field(default_factory=HookConfig)


@dataclass
class ImageNetPreparationConfig(PreparationConfig):
    _target_: str = "pl_pipe.recipes.preparation.imagenet.ImageNetPreparation"
    validation_labels: str | None = None
    """A file with the class of each validation image, a line each, instead of the development kit."""


@dataclass
class WmtEnDePreparationConfig(PreparationConfig):
    _target_: str = "pl_pipe.recipes.preparation.wmt_ende.WmtEnDePreparation"
    texts: Any = MISSING
    """Of what each pair of texts is made."""
    vocabulary: HookConfig = field(default_factory=HookConfig)


@dataclass
class WikiPreparationConfig(PreparationConfig):
    _target_: str = "pl_pipe.recipes.preparation.wiki.WikiPreparation"
    dump: str = "enwiki"
    """Which wiki: `simplewiki` is small."""
    date: str = "latest"
    text_bytes: int = 100_000_000
    """Size of a text file."""
    least_words: int = 5
    """Paragraphs of fewer words are left out."""
    shards: HookConfig = field(default_factory=HookConfig)
