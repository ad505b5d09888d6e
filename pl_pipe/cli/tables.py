"""Tables of what there is to choose from, read from the configuration itself, a user's own folder included."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf
from rich.table import Table

from pl_pipe.cli.front import prepare_hydra
from pl_pipe.cli.overrides import quoted
from pl_pipe.errors import ConfigError


def recipe_table(config_dir: Path | None) -> Table:
    """Name, summary and data sets of every recipe."""
    table = Table(title="Recipes: pl-pipe fit recipe=NAME", title_justify="left", title_style="bold")
    for heading in ("recipe", "what it is", "data"):
        table.add_column(heading, no_wrap=heading == "recipe", overflow="fold")
    for name, about in _abouts("recipe", config_dir):
        table.add_row(name, str(about.get("summary", "")), ", ".join(about.get("data", [])))
    return table


def data_table(config_dir: Path | None) -> Table:
    """Name and summary of every data set."""
    table = Table(title="Data sets: pl-pipe fit data=NAME", title_justify="left", title_style="bold")
    table.add_column("data", no_wrap=True)
    table.add_column("what it is")
    for name, about in _abouts("data", config_dir):
        table.add_row(name, str(about.get("summary", "")))
    return table


def strategy_table(config_dir: Path | None) -> Table:
    """Name, summary, devices and a first try of every strategy."""
    table = Table(title="Strategies: pl-pipe fit strategy=NAME", title_justify="left", title_style="bold")
    for heading in ("strategy", "what it does", "runs on", "devices", "try"):
        table.add_column(heading, no_wrap=heading == "strategy", overflow="fold")
    for name, about in _abouts("strategy", config_dir):
        most = about.get("max_devices")
        devices = "any number" if most is None else f"at most {most}"
        table.add_row(
            name,
            str(about.get("summary", "")),
            ", ".join(about.get("accelerators", [])),
            devices,
            str(about.get("example", "")),
        )
    return table


def choices(group: str) -> list[str]:
    """The options of a configuration group; needs an initialised Hydra."""
    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group, results_filter=ObjectType.CONFIG))


def _abouts(group: str, config_dir: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    with _composing(config_dir) as search:
        names = _names(group, config_dir)
        for name in names:
            node = compose("config", [*search, f"{group}={name}"])[group]
            about = OmegaConf.to_container(node.about, resolve=False) if "about" in node else {}
            assert isinstance(about, dict)
            yield name, {str(key): value for key, value in about.items()}


def _names(group: str, config_dir: Path | None) -> list[str]:
    own = [] if config_dir is None else [file.stem for file in (config_dir / group).glob("*.yaml")]
    return sorted({*choices(group), *own})


def _quoted_path(folder: Path) -> str:
    return quoted("path", f"file://{folder.resolve()}").removeprefix("path=")


@contextmanager
def _composing(config_dir: Path | None) -> Iterator[list[str]]:
    """Hydra ready to compose; gives the overrides that add the user's folder."""
    prepare_hydra("list")
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder; give one that holds recipe/, data/ or strategy/")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        yield [] if config_dir is None else [f"hydra.searchpath=[{_quoted_path(config_dir)}]"]
