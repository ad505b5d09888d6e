"""A user's script over two ranks that see different things: what is decided must be one decision all the same.

python fused_rank_decisions.py FOLDER [NAME …]
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from pl_pipe.callbacks import SuccessiveHalving, VariantEarlyStopping
from pl_pipe.errors import FusionError
from pl_pipe.strategies import FusionDDPStrategy
from pl_pipe.strategies.fusion import array_width, ddp, formulation_trial
from pl_pipe.strategies.fusion.array_steps import ArraySteps
from pl_pipe.strategies.fusion.step_formulation import OneByOne
from tests.fused_modules import Classifier, loader, trainer

RATES = [{"lr": 0.1}, {"lr": 0.05}, {"lr": 0.02}, {"lr": 0.01}]
TIMEOUT = timedelta(seconds=300)  # a busy machine imports for minutes


def fused(variants: Any, module: L.LightningModule, **options: Any) -> tuple[FusionDDPStrategy, L.Trainer]:
    L.seed_everything(1, verbose=False)
    strategy = FusionDDPStrategy(variants, process_group_backend="gloo", timeout=TIMEOUT)
    running = trainer(strategy=strategy, devices=2, **options)
    running.fit(module, loader(batch=5), loader(shuffle=False))
    return strategy, running


def decided(strategy: FusionDDPStrategy) -> dict[str, Any]:
    return {
        "steps": {row.number: row.steps for row in strategy.leaderboard.rows},
        "weights": [{name: value.clone() for name, value in module.named_parameters()} for module in strategy.variants],
    }


class Disagreeing(Classifier):
    """What is best on one rank is worst on the other."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        sign = 1.0 if self.global_rank == 0 else -1.0
        self.log("score", sign * self.hparams["lr"])


class Waning(Classifier):
    """Gets better on rank 0, and on the other does not."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", -float(self.current_epoch) if self.global_rank == 0 else 0.0)


def halving() -> dict[str, Any]:
    callback = SuccessiveHalving("score", factor=2)
    return decided(fused(RATES, Disagreeing(), callbacks=[callback], max_epochs=3)[0])


def stopping() -> dict[str, Any]:
    callback = VariantEarlyStopping("score", patience=1)
    return decided(fused(RATES[:2], Waning(), callbacks=[callback], max_epochs=3)[0])


def predicting() -> dict[str, Any]:
    """Nine samples: three batches of two on one rank, two on the other."""
    strategy, running = fused(RATES[:2], Classifier(), max_epochs=1)
    data = TensorDataset(torch.randn(9, 8, dtype=torch.float64), torch.zeros(9, dtype=torch.long))
    found: Any = running.predict(running.lightning_module, DataLoader(data, batch_size=2))
    buffers = [torch.cat([one.double().reshape(-1) for one in module.buffers()]) for module in strategy.variants]
    return {"batches": len(found), "buffers": buffers}


class Logging(Classifier):
    """Logs numbers of its own size by each name, averaged over ranks at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for size, name in enumerate(("first", "second", "third")):
            self.log(name, 0.0 * loss + 10.0**size, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = 0.0 * self(batch[0]).sum()
        for size, name in enumerate(("val_first", "val_second")):
            self.log(name, loss + 10.0**size, on_step=True, on_epoch=True, sync_dist=True)


class Reading(Logging):
    """Reads a number that differs between variants, on the second rank alone: no array there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            loss.item()
        return loss


def _formulations(module: L.LightningModule, costs: list[dict[str, float]]) -> dict[str, Any]:
    """By a clock of each rank's own: formulations take what they are said to cost."""
    now, plain = SimpleNamespace(s=0.0), {kind: kind.run for kind in (ArraySteps, OneByOne)}

    def timed(kind: Any) -> Any:
        def run(self: Any, call: Any) -> Any:
            now.s += costs[torch.distributed.get_rank()][self.name]
            return plain[kind](self, call)

        return run

    clock, formulation_trial.time = formulation_trial.time, SimpleNamespace(perf_counter=lambda: now.s)  # type: ignore[assignment]
    for kind in plain:
        kind.run = timed(kind)  # type: ignore[method-assign]
    try:
        strategy, running = fused(RATES[:2], module, max_epochs=6)
    finally:
        formulation_trial.time = clock
        for kind, run in plain.items():
            kind.run = run  # type: ignore[method-assign]
    assert strategy.fusion_facts is not None
    return {
        "chosen": strategy.fusion_facts.chosen,
        "metrics": {name: float(value) for name, value in running.callback_metrics.items()},
        **decided(strategy),
    }


QUICK_ARRAY, SLOW_ARRAY = {"array": 0.1, "one by one": 1.0}, {"array": 3.0, "one by one": 0.1}


def clocks() -> dict[str, Any]:
    return _formulations(Logging(), [QUICK_ARRAY, SLOW_ARRAY])


def failures() -> dict[str, Any]:
    return _formulations(Reading(), [QUICK_ARRAY, QUICK_ARRAY])


def _little_on_rank_1(_: Any, *__: Any) -> int:
    """Room for two such models, where rank 0 has plenty."""
    model = Classifier()
    each = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.parameters(), *model.buffers()))
    return 3 * each if os.environ.get("LOCAL_RANK") == "1" else 1 << 40


def memories() -> dict[str, Any]:
    """What is free differs between ranks."""
    with mock.patch.object(array_width, "free_bytes", _little_on_rank_1):
        return decided(fused(RATES, Classifier(), max_epochs=1)[0])


def devices() -> dict[str, Any]:
    """What the devices have at all does."""
    with mock.patch.object(ddp, "whole_bytes", _little_on_rank_1):
        try:
            fused(RATES, Classifier(), max_epochs=1)
        except FusionError as error:
            return {"error": str(error)}
    return {"error": "nothing was refused"}


SCENES = {one.__name__: one for one in (halving, stopping, predicting, clocks, failures, memories, devices)}


def main(folder: Path, names: list[str]) -> None:
    kept = {name: SCENES[name]() for name in names or SCENES}
    torch.save(kept, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
