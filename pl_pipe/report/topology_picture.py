"""A topology as a picture: one drawing a tree, ranks coloured by host. topology -> *picture*."""

import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.comm.topology import SumTree, Topology
from pl_pipe.comm.topology.trees import depths
from pl_pipe.report.charts import figure, stage_colour

_IN_A_ROW = 4
_UP, _DOWN = "#d1615d", "#4878a8"


def draw_topology(topology: Topology, hosts: Sequence[Hashable], path: Path) -> None:
    """Ways up in red, ways down in blue; a PNG."""
    trees: list[SumTree | None] = [*topology.trees] or [None]
    columns = min(_IN_A_ROW, len(trees))
    rows = math.ceil(len(trees) / columns)
    colours = {host: stage_colour(place) for place, host in enumerate(dict.fromkeys(hosts))}
    with figure(path, width=3.2 * columns + 0.4, height=3.0 * rows + 0.5) as drawn:
        drawn.suptitle(f"{topology.name}, {topology.ranks} ranks on {len(colours)} host(s)", fontsize="medium")
        for place, tree in enumerate(trees):
            axes = drawn.add_subplot(rows, columns, place + 1)
            axes.set_axis_off()
            axes.margins(0.2)
            if tree is None:
                axes.text(0.5, 0.5, "the backend's own all_reduce", ha="center", va="center", fontsize="small")
                continue
            at = _places(tree)
            _arrows(axes, [(rank, father) for rank, father in enumerate(tree.up) if rank != father], at, _UP)
            _arrows(axes, [(father, rank) for rank, father in enumerate(tree.down) if rank != father], at, _DOWN)
            for rank, where in at.items():
                axes.scatter(*where, s=260, color=colours[hosts[rank]], zorder=2)
                axes.annotate(str(rank), where, ha="center", va="center", fontsize=8, color="white", zorder=3)


def _places(tree: SumTree) -> dict[int, tuple[float, float]]:
    """By depth, the root on top; a chain's ranks on a circle, as a ring is thought of."""
    levels = depths(tree.up)
    ranks = len(levels)
    if max(levels) == ranks - 1 and ranks > 2:
        turn = 2 * math.pi / ranks
        return {rank: (math.sin(turn * rank), math.cos(turn * rank)) for rank in range(ranks)}
    found = {}
    for level in range(max(levels) + 1):
        members = [rank for rank in range(ranks) if levels[rank] == level]
        for place, rank in enumerate(members):
            found[rank] = (place - (len(members) - 1) / 2, -float(level))
    return found


def _arrows(axes: Any, links: Sequence[tuple[int, int]], at: dict[int, tuple[float, float]], colour: str) -> None:
    for source, target in links:
        style = {
            "arrowstyle": "-|>",
            "color": colour,
            "shrinkA": 9,
            "shrinkB": 9,
            "linewidth": 0.9,
            "connectionstyle": "arc3,rad=0.12",
        }
        axes.annotate("", at[target], at[source], arrowprops=style, zorder=1)
