"""What the package's pictures have in common: colours, units, and figures that need no display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

STAGE_COLOURS = (
    "#4878a8",
    "#e49444",
    "#6a9f58",
    "#d1615d",
    "#85b6b2",
    "#a87c9f",
    "#e7ca60",
    "#967662",
    "#f1a2a9",
    "#79706e",
)
FORWARD, BACKWARD = "#4878a8", "#e49444"


def stage_colour(stage: int) -> str:
    return STAGE_COLOURS[stage % len(STAGE_COLOURS)]


@contextmanager
def figure(path: Path, *, width: float, height: float) -> Iterator[Figure]:
    """A figure that is saved as PNG when the block ends well."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    drawn.savefig(path, dpi=110)
