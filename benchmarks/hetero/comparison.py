"""Uneven workers: samples a second and time to an accuracy, rule by rule, on the same machine in the same run.

    python benchmarks/hetero/comparison.py            # three repeats; wants an idle machine

Every worker trains a small network on scikit-learn's handwritten digits, with Lightning's whole loop; its layers also
sleep for `--step-ms` (a third in the forward, the rest in the backward), so that workers do not compete for cores. Each
of the two stages of a pipeline has half of the sleep, so that all rows have the same compute on four devices.
Unevenness (`hetero=`): `none`; `slow`: rank 1 takes four times as long; `late`: a chance of one in ten to sleep for
0.1 s, before each forward and each backward (SD-Pipe's).

A run ends when it is accurate enough, but trains four epochs. Its samples a second are those after the first epoch. The
report has medians over repeats with their range, and says of every goal whether it is met (`uneven_results.GOALS`).

Every run is a row of `--out` as soon as it is over. A call that was stopped (Ctrl-C, SIGTERM) goes on when it is
repeated; `--again` measures anew, and of the same run the last row counts. `--report` only prints and draws. A run that
fails is named in the end, after all others. To divide the work: `--kinds`, `--rules`, `--first-repeat 1 --repeats 1`,
each call with an `--out` of its own; `--report --add FILE …` puts their rows together. Rows of other machines, numbers
of workers, steps or epochs stay in the file and are told apart.
"""

import argparse
import logging
import sys
import time
import warnings
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
from failures import Failures
from ranks import busy, prepare, run_ranks
from rows import append, read, this_machine, today
from uneven_results import KINDS, Run, by_setting, draw, goals, settled_rate, table

from pl_pipe.callbacks.hetero import HeteroDelays
from pl_pipe.hetero import DelayModel, LateAtRandom, SlowWorker

ROWS = Path(__file__).parent / "comparison.csv"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "uneven.png"
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
        self.samples: list[int] = []
        """Of this rank, until each epoch's end."""
        self._samples = 0
        self._trained_s = 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if getattr(trainer.strategy, "reports", True):  # of a pipeline one rank
            self._samples += len(batch[0])

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._trained_s += time.perf_counter() - self._began_s

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.samples.append(self._samples)
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
    samples = [sum(until) for until in zip(*(one["samples"] for one in found), strict=True)]
    speed = settled_rate([seconds for seconds, _ in curve], samples, left_out=left_out(options))
    return Run(
        *(kind, rule, repeat, options.step_ms, options.accuracy, speed, reached, curve[-1][1]),
        *(len(curve), today(), this_machine(), busy(), options.workers, options.epochs, left_out(options)),
    )


def left_out(options: argparse.Namespace) -> int:
    return 1 if options.epochs > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--accuracy", type=float, default=0.93)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-repeat", type=int, default=0, help="the first one's number, which is its seed")
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--picture", type=Path, help="docs/images/uneven.png, or beside --out where that is given")
    parser.add_argument("--again", action="store_true", help="measure what has been measured before")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="files whose rows are put into --out first")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.picture = options.picture or (PICTURE if options.out == ROWS else options.out.with_suffix(".png"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    add(options.add, options.out)
    failures = Failures()
    if not options.report:
        prepare()
        measure(options, failures)
    report(options)
    failures.end()


def add(files: list[Path], out: Path) -> None:
    """Rows that are there already are not added twice."""
    known = {str(row) for row in read(Run, out)}  # as text: a time of nan would differ from itself
    for file in files:
        if not file.exists():
            raise SystemExit(f"--add {file}: there is no such file")
        for row in read(Run, file):
            if str(row) not in known:
                append(out, row)
                known.add(str(row))


def measure(options: argparse.Namespace, failures: Failures) -> None:
    known = set() if options.again else {row.key for row in read(Run, options.out)}
    here = this_machine(), options.workers, options.step_ms, options.accuracy, options.epochs, left_out(options)
    for repeat in range(options.first_repeat, options.first_repeat + options.repeats):
        for kind in options.kinds:
            for rule in options.rules:
                if (*here, kind, rule, repeat) in known:
                    continue
                with failures.noted(f"{kind} {rule}, repeat {repeat}"):
                    row = measured(rule, kind, options, repeat)
                    append(options.out, row)
                    print(f"  {repeat} {kind:5} {rule:24} {row.samples_per_s:8.1f} samples/s", flush=True)


def report(options: argparse.Namespace) -> None:
    """A table for each setting in the file; the picture is of the one measured last."""
    found = read(Run, options.out)
    settings, rules = by_setting(found), list(RULES)
    for rows in settings.values():
        print("\n".join([*table(rows, rules), *goals(rows)]))
    if found:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(settings[found[-1].setting], rules, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
