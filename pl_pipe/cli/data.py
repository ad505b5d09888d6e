"""`pl-pipe data`: data sets fetched, checked and unpacked. user -> *data commands* -> the recipes' preparations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pl_pipe.cli.messages import say, set_debug
from pl_pipe.cli.overrides import config_flags
from pl_pipe.errors import ConfigError, PlPipeError

app = typer.Typer(name="data", help="Fetch, check and unpack data sets.", no_args_is_help=True)

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks (as does PL_PIPE_DEBUG=1).")]


@app.callback()
def _group() -> None:
    """Without it, Typer would take the only command for the whole group."""


@app.command(context_settings=_OVERRIDES)
def prepare(ctx: typer.Context, debug: Debug = False) -> None:
    """Prepare a data set: `pl-pipe data prepare cifar10 data.root=FOLDER`; also imagenet, squad, wiki, wmt_ende.

    A second call goes on where the first was broken off, or does nothing. Settings: docs/data.md.
    """
    from pl_pipe.cli.front import run_tool  # Hydra takes a second

    set_debug(debug)
    run_tool("prepare", _with_choice(ctx.args))


def prepare_data(cfg: Any) -> None:
    """What the composed configuration asks for; the recipes' class does the work, and speaks through this process."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(cfg.prepare, resolve=True, throw_on_missing=True)
    settings = {name: value for name, value in content.items() if name != "about"}
    try:
        preparation = instantiate(settings, _convert_="all", _recursive_=False)
    except InstantiationException as error:  # Hydra wraps what a constructor raises
        if isinstance(error.__cause__, PlPipeError):
            raise error.__cause__ from error
        raise
    preparation.prepare(cfg.data.root, ConsoleReport())


class ConsoleReport:
    """Sentences and progress bars on the terminal."""

    def say(self, text: str) -> None:
        say(text)

    @contextmanager
    def bar(self, what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total_bytes)
            yield lambda size: progress.advance(task, size)


def _with_choice(arguments: list[str]) -> list[str]:
    """`cifar10 data.root=…` as Hydra wants it."""
    flags = config_flags(arguments)
    names = [token for token in arguments if "=" not in token and not token.startswith("-") and token not in flags]
    known = sorted(
        file.name.removesuffix(".yaml")
        for file in resources.files("pl_pipe.conf").joinpath("prepare").iterdir()
        if file.name.endswith(".yaml")
    )
    if len(names) != 1:
        given = "no data set is named" if not names else f"{', '.join(names)} are several names"
        raise ConfigError(f"{given}; name one of {', '.join(known)}: pl-pipe data prepare {known[0]} data.root=FOLDER")
    return [f"prepare={names[0]}", *(token for token in arguments if token != names[0])]
