"""`summary.json`: what a run was and how it ended, for scripts; and the same in a few lines, for people."""

import json
import math
from pathlib import Path
from typing import Any

from pl_pipe.callbacks.run_summary import FitRecord
from pl_pipe.cli.versions import versions
from pl_pipe.units import format_count, format_duration

SCHEMA = 1


def fit_summary(
    record: FitRecord, *, status: str, choices: dict[str, str], hardware: dict[str, Any], wall_s: float
) -> dict[str, Any]:
    """The content of `summary.json` after a fit."""
    return {
        "schema": SCHEMA,
        "status": status,
        **choices,
        "hardware": hardware,
        "wall_s": round(wall_s, 3),
        **record.as_dict(),
        "versions": versions(),
    }


def write_json(path: Path, content: Any) -> None:
    """Writes strict JSON in one step: a reader sees the old file or the new one; NaN and infinity become null."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    part.replace(path)


def describe_fit(summary: dict[str, Any], run_dir: Path) -> str:
    """The outcome in a few lines."""
    lines = [f"{summary['status']}: {summary['own_steps']} steps in {format_duration(summary['wall_s'])}"]
    if summary["own_steps"] < summary["steps"]:
        lines[0] += f" (to step {summary['steps']})"
    if summary["samples_per_s"]:
        lines[0] += f", {format_count(round(summary['samples_per_s'], 1))} samples/s"
    if summary["best"]:
        best = summary["best"]
        lines.append(f"best {best['monitor']} {best['value']:.4f} (epoch {best['epoch']}, step {best['step']})")
    lines.append(f"run directory: {run_dir}")
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
