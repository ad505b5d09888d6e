"""A plan as a picture of the layer graph, coloured by stage. partition -> *picture*."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.lines import Line2D

from pl_pipe.graph import LayerGraph
from pl_pipe.partition import Plan
from pl_pipe.report.charts import figure, stage_colour
from pl_pipe.units import format_bytes, format_seconds

_COLUMNS = 24
"""Layers side by side before the drawing goes on in the next row."""


def draw_plan(plan: Plan, graph: LayerGraph, path: Path) -> None:
    """Layers as dots (the larger, the more compute), dependencies as lines, in rows read from left to right."""
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    place, height = _layout(graph)
    slowest = max((node.compute_s for node in graph.nodes if not node.is_input), default=0.0)
    with figure(path, width=15.0, height=min(1.6 + 0.5 * height, 40.0)) as drawn:
        axes = drawn.add_subplot()
        for source, target in graph.edges:
            (x0, y0), (x1, y1) = place[source], place[target]
            loaded = graph.by_name[source].is_input  # by each stage for itself
            crosses = stage_of[source] != stage_of[target] and not loaded
            style: dict[str, Any] = (
                {"color": "#222222", "linewidth": 1.6} if crosses else {"color": "#bbbbbb", "linewidth": 0.8}
            )
            bend = 0.0 if abs(x1 - x0) <= 1.01 or y0 != y1 else 0.18
            arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 3, "shrinkB": 3, **style}
            arrow["connectionstyle"] = f"arc3,rad={bend}"
            axes.annotate("", (x1, y1), (x0, y0), zorder=1, arrowprops=arrow)
        for node in graph.nodes:
            share = node.compute_s / slowest if slowest else 0.0
            shown = 18 + 260 * min(share, 1.0)
            colour = stage_colour(stage_of[node.name])
            axes.scatter(*place[node.name], s=shown, color=colour, zorder=2, linewidths=0.6, edgecolors="white")
            if len(graph.nodes) <= 120:
                text = ".".join((node.module or node.description.split("(")[0]).split(".")[-2:])[:14]
                axes.annotate(
                    text, place[node.name], textcoords="offset points", xytext=(0, -11), ha="center", fontsize=5.5,
                    color="#444444",
                )  # fmt: skip
        axes.set_axis_off()
        axes.set_xlim(-1, _COLUMNS)
        axes.set_ylim(0.3 - height, 0.8)
        axes.set_title(
            f"{plan.shape} over {plan.cluster.workers} workers: {format_seconds(plan.predicted_step_s)} a mini-batch, "
            f"{plan.speedup_over_data_parallel:.2f}× data parallel ({plan.cost_model} cost model)",
            fontsize="medium",
        )
        axes.legend(handles=_legend(plan), loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3, frameon=False,
                    fontsize="small")  # fmt: skip


def _layout(graph: LayerGraph) -> tuple[dict[str, tuple[float, float]], float]:
    """Columns by distance from the start, wrapped into rows that run to and fro; gives places and the height."""
    columns: dict[int, list[str]] = defaultdict(list)
    depths = _depths(graph)
    for node in graph.nodes:
        columns[depths[node.name]].append(node.name)
    place: dict[str, tuple[float, float]] = {}
    top, count = 0.0, max(columns) + 1
    for number, first in enumerate(range(0, count, _COLUMNS)):
        row = [columns[depth] for depth in range(first, min(first + _COLUMNS, count))]
        height = max(len(names) for names in row)
        for column, names in enumerate(row):
            x = float(_COLUMNS - 1 - column if number % 2 else column)
            for offset, name in zip(np.arange(len(names)) - (len(names) - 1) / 2, names, strict=True):
                place[name] = (x, -(top + (height - 1) / 2 + float(offset)))
        top += height + 0.6
    return place, top


def _depths(graph: LayerGraph) -> dict[str, int]:
    """Steps from the start; a layer without predecessors stands just before its first user."""
    depths = {name: depth for depth, names in enumerate(nx.topological_generations(graph.digraph)) for name in names}
    for name in depths:
        users = [depths[user] for user in graph.digraph.successors(name)]
        if not graph.digraph.in_degree(name) and users:
            depths[name] = min(users) - 1
    return depths


def _legend(plan: Plan) -> list[Line2D]:
    shown = plan.stages[:24]
    entries = []
    for index, stage in enumerate(shown):
        text = (
            f"stage {index}: {len(stage.nodes)} layers × {stage.replicas}, {format_seconds(stage.compute_s)}, "
            f"{format_bytes(stage.parameter_bytes)}"
        )
        entries.append(Line2D([], [], marker="o", linestyle="", color=stage_colour(index), label=text))
    if len(plan.stages) > len(shown):
        entries.append(Line2D([], [], linestyle="", label=f"… {len(plan.stages) - len(shown)} more stages"))
    return entries
