"""A profile as a bar chart: where a model's time goes, and how large its layers are. profiling -> *chart*."""

from pathlib import Path

import numpy as np

from pl_pipe.graph import Profile
from pl_pipe.report.charts import BACKWARD, FORWARD, figure
from pl_pipe.units import format_seconds

_LABELLED = 70
"""More layers than this are labelled by every n-th name."""


def draw_profile(profile: Profile, path: Path) -> None:
    """Time above, sizes below, one column a layer in execution order."""
    layers = [node for node in profile.graph.nodes if not node.is_input]
    columns = np.arange(len(layers))
    forward_ms = np.array([node.forward_s for node in layers]) * 1e3
    backward_ms = np.array([node.backward_s for node in layers]) * 1e3
    with figure(path, width=min(max(8.0, 0.22 * len(layers)), 28.0), height=7.0) as drawn:
        times, sizes = drawn.subplots(2, 1, sharex=True)
        times.bar(columns, forward_ms, color=FORWARD, label="forward")
        times.bar(columns, backward_ms, bottom=forward_ms, color=BACKWARD, label="backward")
        times.set_ylabel("time (ms)")
        times.legend(frameon=False)
        times.set_title(
            f"{profile.model} on {profile.device}, {', '.join(profile.batch)}: step {format_seconds(profile.step_s)}, "
            f"layers {format_seconds(profile.graph.compute_s)}",
            fontsize="medium",
        )
        for offset, (name, colour, values) in enumerate(
            (
                ("outputs", "#85b6b2", [node.total_output_bytes for node in layers]),
                ("parameters", "#6a9f58", [node.parameter_bytes for node in layers]),
                ("kept for backward", "#d1615d", [node.kept_bytes for node in layers]),
            )
        ):
            sizes.bar(columns + (offset - 1) * 0.28, np.array(values) / 1e6, width=0.28, color=colour, label=name)
        sizes.set_yscale("log")
        sizes.set_ylabel("size (MB)")
        sizes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize="small")
        step = -(-len(layers) // _LABELLED)
        labels = [(node.module or node.description)[:28] for node in layers[::step]]
        sizes.set_xticks(columns[::step], labels, rotation=90, fontsize="x-small")
        for axes in (times, sizes):
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.01)
