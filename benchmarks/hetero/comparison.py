"""Uneven workers: samples a second and time to an accuracy, rule by rule, on the same machine in the same run.

    python benchmarks/hetero/comparison.py            # about a quarter of an hour on an idle machine

Every worker trains a small network on scikit-learn's handwritten digits, with Lightning's whole loop; its layers also
sleep for `--step-ms` (a third in the forward, the rest in the backward), so that workers do not compete for cores. Each
of the two stages of a pipeline has half of the sleep, so that all rows have the same compute on four devices.
Unevenness (`hetero=`): `none`; `slow`: rank 1 takes four times as long; `late`: a chance of one in ten to sleep for
0.1 s, before each forward and each backward (SD-Pipe's).

Goals, with four devices: `partial_reduce` and `ad_psgd` at least twice the samples a second of `allreduce` with `slow`;
`partial_reduce` within 5 % of `allreduce` with `none`; `allreduce` within 3 % of Lightning's DDP; `sdpipe` more than
`pipedream` and, when it averages as seldom (`sdpipe every 4`), than `sdpipe wave` (HetPipe) with `late`. A run ends
when it is accurate enough, but trains four epochs.

Every run is a row of `--out` as soon as it is over. A call that was stopped (Ctrl-C, SIGTERM) goes on when it is
repeated; `--again` measures anew, `--report` only draws docs/images/uneven.png and prints the table. Times are medians.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "pipedream"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from efficiency import Nap
from ranks import busy, prepare, run_ranks
from rows import append, read, this_machine, today

from pl_pipe.callbacks.hetero import HeteroDelays
from pl_pipe.hetero import DelayModel, LateAtRandom, SlowWorker

HERE = Path(__file__).parent
ROWS = HERE / "comparison.csv"
PICTURE = HERE.parents[1] / "docs" / "images" / "uneven.png"
KINDS = ("none", "slow", "late")
EPOCHS_AT_LEAST = 4
CUT = {"split_points": ["net.2"]}
WAVE = 4
"""Steps alone between two averagings, where rules that average as seldom are compared."""
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "allreduce": ("data_parallel", {"synchronizer": "allreduce"}),
    "partial_reduce": ("data_parallel", {"synchronizer": "partial_reduce"}),
    "partial_reduce dynamic": ("data_parallel", {"synchronizer": "partial_reduce", "averaging": "dynamic"}),
    "partial_reduce every 4": ("data_parallel", {"synchronizer": "partial_reduce", "every": WAVE}),
    "ad_psgd": ("data_parallel", {"synchronizer": "ad_psgd"}),
    "ad_psgd matching": ("data_parallel", {"synchronizer": "ad_psgd", "matching": True}),
    "hetpipe D=0": ("data_parallel", {"synchronizer": "wave", "wave": WAVE}),
    "hetpipe D=4": ("data_parallel", {"synchronizer": "wave", "wave": WAVE, "distance": 4}),
    "sma": ("data_parallel", {"synchronizer": "sma"}),
    "pair": ("data_parallel", {"synchronizer": "pair"}),
    "pipedream": ("pipedream", {**CUT, "replicas": [2, 2]}),
    "sdpipe": ("sdpipe", {**CUT}),
    "sdpipe every 4": ("sdpipe", {**CUT, "every": WAVE}),
    "sdpipe allreduce": ("sdpipe", {**CUT, "synchronizer": "allreduce"}),
    "sdpipe ad_psgd": ("sdpipe", {**CUT, "synchronizer": "ad_psgd"}),
    "sdpipe wave D=0": ("sdpipe", {**CUT, "synchronizer": "wave", "wave": WAVE}),
    "sdpipe wave D=4": ("sdpipe", {**CUT, "synchronizer": "wave", "wave": WAVE, "distance": 4}),
}
STRATEGIES = {"data_parallel": "DataParallelStrategy", "pipedream": "PipeDreamStrategy", "sdpipe": "SDPipeStrategy"}


@dataclass(frozen=True)
class Run:
    """One row."""

    hetero: str
    rule: str
    repeat: int
    step_ms: float
    accuracy_wanted: float
    samples_per_s: float
    reached_s: float
    """Seconds of training until it was accurate enough; nan where it never was."""
    accuracy: float
    """In the end."""
    epochs: int
    date: str
    machine: str
    load: str


class Sleeper(nn.Module):
    """Compute of a stage: the rank that has it waits for it, not all that run the step's Python."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        slept: Tensor = Nap.apply(x, self.step_s / 3, 2 * self.step_s / 3)  # type: ignore[no-untyped-call]
        return slept


class Digits(L.LightningModule):
    """A step computes little, and sleeps."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        first = [nn.Linear(64, 256), Sleeper(step_s / 2), nn.ReLU()]
        second = [nn.Linear(256, 128), Sleeper(step_s / 2), nn.ReLU(), nn.Linear(128, 10)]
        self.net = nn.Sequential(*first, *second)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watch(L.Callback):
    """When each epoch ended, validations left out, and how accurate the model was then."""

    def __init__(self, wanted: float) -> None:
        self.wanted = wanted
        self.curve: list[tuple[float, float]] = []
        self.samples = 0
        self._trained_s = 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if getattr(trainer.strategy, "reports", True):  # of a pipeline one rank
            self.samples += len(batch[0])

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._trained_s += time.perf_counter() - self._began_s

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.curve.append((self._trained_s, float(trainer.callback_metrics["val_acc"])))
        if len(self.curve) >= EPOCHS_AT_LEAST and any(accuracy >= self.wanted for _, accuracy in self.curve):
            trainer.should_stop = True


def make_delays(kind: str, seed: int, step_s: float) -> list[L.Callback]:
    def make(rank: int) -> DelayModel:
        if kind == "slow":
            return SlowWorker(rank=rank, ranks=[1], factor=4.0)
        return LateAtRandom(rank=rank, seed=seed, delay_s=0.1)

    return [] if kind == "none" else [HeteroDelays(make, step_s=step_s)]


def train(rule: str, kind: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One rank's part."""
    import pl_pipe.strategies as strategies

    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    L.seed_everything(seed)
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    name, settings = RULES[rule]
    strategy: Any = "ddp" if name == "ddp" else getattr(strategies, STRATEGIES[name])(**settings)
    step_s = options.step_ms / 1000
    on_a_rank_s = step_s / (2 if name in ("pipedream", "sdpipe") else 1)
    watch = Watch(options.accuracy)
    trainer = L.Trainer(
        accelerator="cpu", devices=options.workers, strategy=strategy, max_epochs=options.epochs,
        callbacks=[*make_delays(kind, seed, on_a_rank_s), watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    training = DataLoader(TensorDataset(x[:1440], y[:1440]), 16, shuffle=True)
    trainer.fit(Digits(step_s), training, DataLoader(TensorDataset(x[1440:], y[1440:]), 64))
    return {"curve": watch.curve, "samples": watch.samples}


def measured(rule: str, kind: str, options: argparse.Namespace, repeat: int) -> Run:
    found = run_ranks(train, options.workers, rule, kind, options, repeat)
    curve = found[0]["curve"]
    reached = next((seconds for seconds, accuracy in curve if accuracy >= options.accuracy), float("nan"))
    samples = sum(one["samples"] for one in found)
    return Run(
        *(kind, rule, repeat, options.step_ms, options.accuracy, samples / curve[-1][0], reached, curve[-1][1]),
        *(len(curve), today(), this_machine(), busy()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--accuracy", type=float, default=0.93)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--again", action="store_true", help="measure what has been measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.report:
        prepare()
        measure(options)
    report(options)


def measure(options: argparse.Namespace) -> None:
    if options.again:
        options.out.unlink(missing_ok=True)
    known = {(row.repeat, row.hetero, row.rule) for row in rows_for(options)}
    for repeat in range(options.repeats):
        for kind in options.kinds:
            for rule in options.rules:
                if (repeat, kind, rule) not in known:
                    row = measured(rule, kind, options, repeat)
                    append(options.out, row)
                    print(f"  {repeat} {kind:5} {rule:24} {row.samples_per_s:8.1f} samples/s", flush=True)


def rows_for(options: argparse.Namespace) -> list[Run]:
    rows = read(Run, options.out)
    return [row for row in rows if (row.step_ms, row.accuracy_wanted) == (options.step_ms, options.accuracy)]


def report(options: argparse.Namespace) -> None:
    rows = rows_for(options)
    print(f"steps of {options.step_ms:g} ms; seconds to {options.accuracy:.0%}; {busy()}")
    print(f"{'':6} {'rule':24} {'samples/s':>10} {'of allreduce':>13} {'s to accuracy':>14} {'in the end':>11}")
    table: dict[tuple[str, str], tuple[float, float]] = {}
    for kind in KINDS:
        base = median(rows, kind, "allreduce", "samples_per_s")
        for rule in RULES:
            speed, reached = (median(rows, kind, rule, name) for name in ("samples_per_s", "reached_s"))
            if speed == speed:  # measured
                table[kind, rule] = speed, reached
                accuracy = median(rows, kind, rule, "accuracy")
                print(f"{kind:6} {rule:24} {speed:>10.1f} {speed / base:>13.2f} {reached:>14.2f} {accuracy:>11.3f}")
    if table:
        draw(table, options)


def median(rows: list[Run], kind: str, rule: str, name: str) -> float:
    found = [getattr(row, name) for row in rows if (row.hetero, row.rule) == (kind, rule)]
    return statistics.median(found) if found else float("nan")


def draw(table: dict[tuple[str, str], tuple[float, float]], options: argparse.Namespace) -> None:
    from pl_pipe.report.charts import figure, stage_colour

    labels = ("samples/s", f"s to {options.accuracy:.0%} accuracy")
    with figure(PICTURE, width=12, height=7) as drawn:
        axes = drawn.subplots(len(labels), len(KINDS), sharey=True)
        for row, label in enumerate(labels):
            for column, kind in enumerate(KINDS):
                axis, values = axes[row][column], [table.get((kind, rule), (0.0, 0.0))[row] for rule in RULES]
                axis.barh(list(RULES), values, color=stage_colour(row))
                axis.set(xlabel=label, title=kind if row == 0 else None)
        axes[0][0].invert_yaxis()


if __name__ == "__main__":
    main()
