"""How far long work of a recipe is, shown on a terminal and nowhere else: training has Lightning's own bar."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")


def tracked(items: Iterable[Item], what: str, *, count: int) -> Iterator[Item]:
    """The items, with a bar that tells how many of them have been taken, of `count`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _progress(*columns) as progress:
        yield from progress.track(items, total=count, description=what)


@contextmanager
def counting(what: str, of: str) -> Iterator[Callable[[int], None]]:
    """For work whose end is not known: the block tells how many it has done; nothing is shown before it does."""
    progress = _progress(SpinnerColumn(), TextColumn(f"{{task.description}}: {{task.completed:,.0f}} {of}"))
    task = progress.add_task(what, total=None)

    def tell(done: int) -> None:
        progress.start()
        progress.update(task, completed=done)

    try:
        yield tell
    finally:
        progress.stop()


def _progress(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, transient=True, disable=not Console().is_terminal)
