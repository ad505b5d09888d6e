"""Variants whose weights are no longer finite numbers are told, are never the best, and end nobody else's training."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.callbacks import SuccessiveHalving
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion.variant_records import has_diverged
from tests.fused_modules import Classifier, loader, trainer

LOST = 1e200
"""A learning rate that makes NaN of the weights within an epoch, in double precision too."""


class Promising(Classifier):
    """With `lost` it seems the best of all, and its weights become infinite in the second epoch."""

    def __init__(self, lost: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", 0.75 if self.hparams["lost"] else 0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hparams["lost"] and self.current_epoch == 1:
            for parameter in self.parameters():
                parameter.grad.fill_(float("inf"))


def statuses(fused: FusionStrategy) -> list[tuple[int, str]]:
    return [(row.number, row.status) for row in fused.leaderboard.rows]


def test_a_variant_that_has_diverged_is_not_the_best(tmp_path: Path) -> None:
    fused = FusionStrategy([{"lost": True}, {}], folder=tmp_path, monitor="val_acc")
    running = trainer(strategy=fused, max_epochs=2)
    running.fit(Promising(), loader(), loader(shuffle=False))
    assert statuses(fused) == [(1, "trained"), (0, "diverged")]
    assert [row.best for row in fused.leaderboard.rows] == [0.5, 0.75]
    running.save_checkpoint(tmp_path / "whole.ckpt")
    led = Promising.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=False)
    assert not led.hparams["lost"]
    assert not has_diverged(led)


class Leaving(L.Callback):
    def on_train_epoch_end(self, running: Any, module: L.LightningModule) -> None:
        running.strategy.stop_variants([0, 1], "enough")


@pytest.mark.parametrize(
    ("callback", "why"),
    [(Leaving(), "enough"), (SuccessiveHalving("val_loss", factor=3), "left behind after 1 epochs")],
)
def test_variants_that_leave_are_told_to_have_diverged(callback: L.Callback, why: str) -> None:
    fused = FusionStrategy([{"lr": 0.1}, {"lr": LOST}, {"lr": 0.05}])
    trainer(strategy=fused, max_epochs=2, callbacks=[callback]).fit(Classifier(), loader(), loader(shuffle=False))
    told = dict(statuses(fused))
    assert told[1] == f"{why}, diverged"
    assert why in (told[0], told[2])


class Unlucky(Classifier):
    fails = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 2:
            raise RuntimeError("no more")


def test_what_became_of_arrays_that_another_fit_has_not_come_to_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = FusionStrategy([{"lr": 0.1}, {"lr": LOST}], max_array=1)
    running, module = trainer(strategy=fused, max_epochs=1), Unlucky()
    running.fit(module, loader(), loader(shuffle=False))
    assert statuses(fused) == [(0, "trained"), (1, "diverged")]
    running.fit_loop.max_epochs = 2
    monkeypatch.setattr(Unlucky, "fails", True)
    with pytest.raises(RuntimeError, match="no more"):
        running.fit(module, loader(), loader(shuffle=False))
    assert statuses(fused) == [(0, "interrupted"), (1, "diverged")]


class Masked(L.LightningModule):
    """Parameters that are not trained may be infinite, or of types that know no infinity."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.none = nn.Linear(8, 10), nn.Parameter(torch.zeros(0))
        self.mask = nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False)
        self.small = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def test_only_weights_that_are_trained_diverge(tmp_path: Path) -> None:
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}], folder=tmp_path, formulation="one by one")
    trainer(strategy=fused, max_epochs=1, precision="32-true").fit(Masked(), loader(dtype=torch.float32))
    assert [status for _, status in statuses(fused)] == ["trained"] * 2
    assert (tmp_path / "variants" / "variant_1.ckpt").is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_one_number_is_enough(value: float, dtype: torch.dtype) -> None:
    module = nn.ParameterList([torch.zeros(0, dtype=dtype), torch.full((3, 2), 6e4, dtype=dtype)])
    assert not has_diverged(module)
    with torch.no_grad():
        module[1][2, 1] = value
    assert has_diverged(module)
