"""What `FusionStrategy` takes through `trainer.fit`, against the same variants one after another by plain Lightning.

    python benchmarks/fusion/through_trainer.py --out through_trainer.csv [--models perceptron …] [--variants 1 4 8]

A plain run, the fused one, and the plain one again, by turns in one process and on the same batches; steps are timed
between the ends of batches, after the formulations were compared. A repeat's ratio is the plain steps' mean, as many
times as there are variants, over the fused one: above 1 where fusion is quicker. One variant shows what the strategy
itself costs. `--clock cpu` counts the process's CPU seconds, for which other work on the machine matters less.
"""

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from speed_rows import append, check_columns, now
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import LENGTH, LanguageModel, PointNet

from pl_pipe.strategies import FusionStrategy

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
COLUMNS = (
    "model", "variants", "threads", "clock", "alone_ms", "fused_ms", "ratio", "lowest", "highest", "repeats",
    "formulation", "date",
)  # fmt: skip
_WORDS = 500
_SETTLED = 12
"""Steps before timing: formulations are compared in the first eight."""


class Network(L.LightningModule):
    def __init__(self, model: str, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = MODELS[model][0]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 25, 10)),
    )


def images(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, 3, size, size), torch.randint(0, 10, (count,)))


def words(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, _WORDS, (count, LENGTH)), torch.randint(0, _WORDS, (count, LENGTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "perceptron": (perceptron, lambda count: (torch.randn(count, 64), torch.randint(0, 10, (count,)))),
    "convolutions": (convolutions, images(28)),
    "transformer": (lambda: LanguageModel(2, 128, 2, 128, False, _WORDS), words),
    "pointnet": (PointNet, lambda count: (torch.randn(count, 3, 64), torch.randint(0, 16, (count,)))),
    "mobilenet": (lambda: torchvision.models.mobilenet_v2(num_classes=10), images(32)),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), images(32)),
}
"""How a model is built, and what so many samples for it are."""


class Clock(L.Callback):
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._ends.append(self._now())

    def step_s(self) -> float:
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(self._ends[_SETTLED:]))


def step_s(model: str, options: argparse.Namespace, strategy: Any = "auto") -> float:
    clock = Clock(CLOCKS[options.clock])
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    L.seed_everything(1, verbose=False)
    module, samples = Network(model), MODELS[model][1](options.batch * options.steps)
    trainer.fit(module, DataLoader(TensorDataset(*samples), batch_size=options.batch))
    return clock.step_s()


def measured(model: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    alone, fused, ratios, formulation = [], [], [], ""
    before = step_s(model, options)
    for _ in range(options.repeats):
        strategy = FusionStrategy(
            {"lr": [0.01 * (place + 1) for place in range(count)]}, formulation=options.formulation
        )
        fused.append(step_s(model, options, strategy))
        after = step_s(model, options)
        alone.append((before + after) / 2)
        ratios.append(count * alone[-1] / fused[-1])
        before = after
        assert strategy.fusion_facts is not None
        formulation = strategy.fusion_facts.chosen["training_step"]
    return {
        "model": model, "variants": count, "threads": options.threads, "clock": options.clock,
        "alone_ms": round(1e3 * statistics.median(alone), 3), "fused_ms": round(1e3 * statistics.median(fused), 3),
        "ratio": round(statistics.median(ratios), 3), "lowest": round(min(ratios), 3), "highest": round(max(ratios), 3),
        "repeats": options.repeats, "formulation": formulation,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variants", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--formulation", default="auto")
    parser.add_argument("--out", type=Path, help="a CSV file, which grows by a row at a time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.out is not None:
        check_columns(options.out, COLUMNS)
    failures = []
    for model, count in itertools.product(options.models, options.variants):
        try:
            row = measured(model, count, options)
        except Exception as error:  # the others are measured nevertheless
            failures.append(f"{model}, {count} variants: {type(error).__name__}: {error}")
            print(failures[-1], flush=True)
            continue
        if options.out is not None:
            append(options.out, COLUMNS, {**row, "date": now()})
        print(
            f"{model:14} {count:2} variants  {row['ratio']:.2f} times as fast as one after another "
            f"({row['lowest']:.2f} to {row['highest']:.2f}), as {row['formulation']}; alone {row['alone_ms']:.2f} ms",
            flush=True,
        )
    if failures:
        raise SystemExit(f"{len(failures)} models failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
