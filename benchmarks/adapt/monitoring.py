"""What monitors cost a step, with gradients as large as ResNet-50's: steps with and without them take turns.

    python benchmarks/adapt/monitoring.py --ranks 2

Compute is the real network's on small images, so a step is shorter than in practice and the share an upper bound. Each
step is compared with the plain one of the same round; medians of these shares count, and their quartiles are told.
Where steps vary by more than a monitor takes, its own time tells more: that in its own code, on rank 0, without what
waiting for the other ranks' two or three numbers takes.
"""

import argparse
import functools
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.multiprocessing as mp
from runs import Row, write_rows
from series import added, quartiles
from torch.utils.data import DataLoader

from pl_pipe.adapt.monitors import GradientNoiseScale, GradientVariance, Monitor
from pl_pipe.adapt.monitors.local_gradients import LocalGradients
from pl_pipe.recipes.vision.classifier import ImageClassifier
from pl_pipe.recipes.vision.synthetic import RandomImages
from pl_pipe.report.charts import figure, stage_colour
from pl_pipe.strategies import AdaptiveCommStrategy

PLAIN = "plain"
KINDS = {
    PLAIN: None,
    "noise_scale": GradientNoiseScale,
    "variance": GradientVariance,
    "variance, elementwise": lambda: GradientVariance(elementwise=True),
}
NEVER = 1 << 40
_FEW = 8


class OwnTime:
    """Seconds in monitors' own code since it was last asked."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def taken(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._counted(function, lambda _: 1.0)

    def without(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Of a few numbers, within a function that is counted."""
        return self._counted(reduce, lambda arguments: -1.0 if arguments[0].numel() <= _FEW else 0.0)

    def _counted(self, function: Callable[..., Any], sign: Callable[..., float]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += sign(args) * (time.perf_counter() - began_s)

        return run


class Turns(L.Callback):
    """Lets one kind of monitor measure in each step; notes how long the step took."""

    def __init__(self, monitors: dict[str, Monitor | None]) -> None:
        self.monitors, self.times_s = monitors, {name: list[float]() for name in monitors}
        self.own_s = {name: list[float]() for name in monitors}
        self._own = OwnTime()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        LocalGradients._came = self._own.of(LocalGradients._came)  # type: ignore[method-assign]
        trainer.strategy.reduce = self._own.without(trainer.strategy.reduce)
        for monitor in filter(None, self.monitors.values()):
            monitor.on_after_backward = self._own.of(monitor.on_after_backward)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.name = list(self.monitors)[batch_idx % len(self.monitors)]
        for name, monitor in self.monitors.items():
            if monitor is not None:
                monitor.interval = 1 if name == self.name else NEVER
        self._own.taken()
        self.began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2 * len(self.monitors):
            self.times_s[self.name].append(time.perf_counter() - self.began_s)
            self.own_s[self.name].append(self._own.taken())


def main() -> None:
    options = _options()
    with mp.get_context("spawn").Manager() as manager:
        found: Any = manager.dict()
        mp.spawn(_rank, args=(options, found), nprocs=options.ranks)
        times_s, own_s = found["step"], found["own"]
    rows = []
    plain_s = statistics.median(times_s[PLAIN])
    for name, shares in added(times_s, PLAIN).items():
        step_s, (lower, middle, upper) = statistics.median(times_s[name]), quartiles(shares)
        own = statistics.median(own_s[name])
        rows.append(
            {
                "monitor": name, "rounds": len(shares), "step_s": step_s, "more": middle, "lower": lower,
                "upper": upper, "own_s": own, "own": own / plain_s,
            }
        )  # fmt: skip
        print(
            f"{name:24s} {1e3 * step_s:8.1f} ms a step  {100 * middle:+.1f} % (half of {len(shares)} rounds: "
            f"{100 * lower:+.1f} to {100 * upper:+.1f}); its own {1e3 * own:.1f} ms, {100 * own / plain_s:.1f} %"
        )
    write_rows(Path(options.out) / "monitoring.csv", rows)
    _draw(Path(options.out) / "monitoring.png", [row for row in rows if row["monitor"] != PLAIN])


def _draw(path: Path, rows: list[Row]) -> None:
    """What each adds to a step, half of the rounds as a line; the part in its own code in front of it."""
    names, more = [row["monitor"] for row in rows], [100 * row["more"] for row in rows]
    spread = [[100 * abs(row["more"] - row[end]) for row in rows] for end in ("lower", "upper")]
    with figure(path, width=8, height=3) as drawn:
        axes = drawn.add_subplot()
        axes.barh(names, more, xerr=spread, color=stage_colour(1), label="longer steps, half of the rounds")
        axes.barh(names, [100 * row["own"] for row in rows], height=0.3, color=stage_colour(0), label="its own time")
        axes.invert_yaxis()
        axes.set_xlabel("% of a plain step")
        axes.legend(frameon=False)
    print(path)


def _rank(rank: int, options: argparse.Namespace, found: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), NODE_RANK="0", LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
    )  # fmt: skip
    monitors = {name: make() if make is not None else None for name, make in _chosen(options).items()}
    turns = Turns(monitors)
    used = [monitor for monitor in monitors.values() if monitor is not None]
    size = options.image_size
    model = ImageClassifier("resnet50", num_classes=1000, image_size=size, lr=0.001)
    data = RandomImages((3, size, size), num_classes=1000, length=options.batch * options.steps * options.ranks, seed=0)
    trainer = L.Trainer(
        accelerator="cpu", devices=options.ranks, strategy=AdaptiveCommStrategy("native", adapt=False), max_epochs=1,
        callbacks=[turns, *used], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=options.batch))
    if rank == 0:
        found.update(step=turns.times_s, own=turns.own_s)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    return {name: make for name, make in KINDS.items() if name == PLAIN or name in options.monitors}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=88)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--monitors", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--port", type=int, default=None, help="For the ranks to meet at; a free one if not given.")
    parser.add_argument("--out", default="outputs/adapt")
    found = parser.parse_args()
    found.port = found.port or _free_port()
    return found


if __name__ == "__main__":
    main()
