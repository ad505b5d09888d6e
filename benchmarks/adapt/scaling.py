"""Two to eight workers against the ideal: recorded compute, real sums over rehearsed links.

    sudo -E .venv/bin/python benchmarks/adapt/scaling.py

Two cores cannot compute for eight; so compute is recorded (docs/recorded.md), and slowed down with the links: ResNet-50
as published for a V100, MobileNetV2 as a thread of this machine computes it, which is profiled first. One CSV row a
step; the last line of each run is JSON with the mean and the spread of samples a second and rank. Runs that ended are
not repeated; rows that other calls have measured in the same setting (`--models`, `--workers`) are kept, and drawn too.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import Failures, Row, draw_lines, keep_rows, of_setting, read_rows, setting_of, steps, trained, trained_in

from pl_pipe.cluster import LabConfig, LinkConfig

RATE = "samples_per_s_and_rank"
PUBLISHED = Path(__file__).parents[1] / "pipedream" / "profiles"


@dataclass(frozen=True)
class Recorded:
    """A model's record, and how it is slowed down."""

    batch_size: int
    dilation: float
    published: str | None = None


MODELS = {
    "resnet50": Recorded(128, 10.0, "resnet50.graph.txt"),
    "mobilenet_v2": Recorded(8, 10.0),
}


def main() -> None:
    options = _options()
    folder, failures, setting = Path(options.out), Failures(), setting_of(options, "steps", "rate", "topology")
    rows = read_rows(folder / "scaling.csv")
    for model in options.models:
        for workers in options.workers:
            run = f"{model} on {workers}"
            with failures.noted(run):
                rates = _rates(model, _profile(model, folder / "profiles" / model), workers, options)
                found = [
                    {"setting": setting, "run": run, "model": model, "workers": workers, "step": step, RATE: rate}
                    for step, rate in enumerate(rates)
                ]
                rows = keep_rows(folder / "scaling.csv", found)
                told = dict(zip((RATE, "spread"), mean_and_spread(found), strict=True))
                print(json.dumps({"model": model, "workers": workers, **told}), flush=True)
    means: dict[str, dict[int, float]] = {}
    for found in of_setting(rows, setting).values():
        means.setdefault(found[0]["model"], {})[found[0]["workers"]] = mean_and_spread(found)[0]
    if means:
        lines: dict[str, Any] = {model: _in_workers(of) for model, of in means.items()}
        most = max(max(of) for of in means.values())
        lines["ideal"] = ([1, most], [1, most])
        draw_lines(folder / "scaling.png", lines, x="workers", y="throughput, in workers of the smallest run")
    failures.end()


def mean_and_spread(rows: list[Row]) -> tuple[float, float]:
    """Of samples a second and rank, without the first two steps."""
    rates = [row[RATE] for row in rows]
    settled = rates[2:] or rates
    return statistics.mean(settled), statistics.pstdev(settled)


def _in_workers(means: dict[int, float]) -> tuple[list[int], list[float]]:
    smallest = means[min(means)]
    return sorted(means), [workers * means[workers] / smallest for workers in sorted(means)]


def _rates(model: str, profile: Path, workers: int, options: argparse.Namespace) -> list[float]:
    """Samples a second and rank, by step, on the record's clock."""
    record = MODELS[model]
    lab = LabConfig(hosts=workers, devices_per_host=1, between=LinkConfig(rate=options.rate))
    command = [
        "fit", "recipe=recorded", f"recipe.profile={profile.resolve()}", f"recipe.dilation={record.dilation}",
        "data=recorded", f"data.batches={options.steps * workers}", f"data.batch_size={record.batch_size}",
        "strategy=adaptive", f"strategy.topology={options.topology}", "strategy.adapt=false", "callbacks=monitors",
        "callbacks.noise_scale=null", "callbacks.latencies=null", "callbacks.last=null", "callbacks.best=null",
        "callbacks.progress=null", "trainer.max_epochs=1", "trainer.limit_val_batches=0",
        "trainer.enable_model_summary=false",
    ]  # fmt: skip
    run = trained_in(lab, command, Path(options.out) / model / f"{workers}")
    return [record.dilation * row["samples_per_s"] / workers for row in steps(run)]


def _profile(model: str, folder: Path) -> Path:
    record = MODELS[model]
    if record.published is not None:
        return PUBLISHED / record.published
    path = folder.resolve() / "profile.json"
    settings = [f"recipe={model}", "data=synthetic", "data.image_size=64", f"data.batch_size={record.batch_size}"]
    command = ["profile", *settings, "profiling.repeats=5", f"hydra.run.dir={folder.resolve()}"]
    trained(command, folder, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # a worker's share of a machine is one core
    return path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", default="1gbit", help="Of every host's link; 10 Gbit/s at a dilation of 10.")
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--out", default="outputs/adapt/scaling")
    return parser.parse_args()


if __name__ == "__main__":
    main()
