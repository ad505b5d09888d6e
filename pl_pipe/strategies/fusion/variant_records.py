"""What is known of each variant: its metrics over time, its best, when it left. trainer -> *records* -> leaderboard."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.report.leaderboard import DIVERGED, TRAINED, Curves, Leaderboard, Row
from pl_pipe.strategies.fusion.late_numbers import LateNumbers
from pl_pipe.strategies.fusion.trainer_metrics import metrics_of_variants
from pl_pipe.strategies.fusion.variant_choices import Choice
from pl_pipe.strategies.fusion.variant_names import better, direction, divided
from pl_pipe.tensors.lineage import version

_VALIDATION_LOSSES = ("val_loss", "valid_loss", "validation_loss")
_TRAINING_LOSSES = ("train_loss", "loss")


class VariantRecords:
    def __init__(self, choices: Sequence[Choice], *, monitor: str | None, mode: str | None) -> None:
        self._choices = list(choices)
        self._monitor = monitor
        self._mode = mode
        self.modes: Mapping[str, str] = {}
        """Told by callbacks, for metrics that they monitor."""
        self.clear()

    def clear(self) -> None:
        self._known: Curves = {}
        self._late: list[tuple[int, list[tuple[int, str]], LateNumbers]] = []
        """Of a step: whose they are, and by which names."""
        self._noted: dict[str, tuple[Tensor, int]] = {}
        self._steps: dict[int, int] = {}
        self._left: dict[int, tuple[int, str]] = {}
        self._last: set[tuple[int, str]] = set()
        """Metrics that a variant's last hooks have logged when it left."""
        self._cut: set[int] = set()
        """Variants whose training was interrupted."""
        self._diverged: set[int] = set()

    def begin(self, numbers: Sequence[int]) -> None:
        """These are trained, those too that have left another fit. What became of the others stands."""
        self._left = {number: left for number, left in self._left.items() if number not in numbers}
        self._last = {(number, name) for number, name in self._last if number not in numbers}
        self._cut.difference_update(numbers)
        self._diverged.difference_update(numbers)

    def note(self, metrics: Mapping[str, Any], step: int, *, are_last: bool = False) -> None:
        """Metrics named `…/variant_k`, as far as they are not the last time's; a second value for a step takes the
        place of the first, unless that was the last one of a variant that has left."""
        owners: list[tuple[int, str]] = []
        values: list[Tensor | float | int] = []
        for name, value in metrics.items():
            plain, number = divided(name)
            if number is None or not isinstance(value, Tensor | float | int):
                continue
            if number in self._left and (step > self._left[number][0] or (number, plain) in self._last):
                continue
            if are_last:
                self._last.add((number, plain))
            self._steps[number] = max(step, self._steps.get(number, 0))
            if isinstance(value, Tensor):
                if name in self._noted and _is_same(value, *self._noted[name]):
                    continue
                self._noted[name] = value, version(value)
            owners.append((number, plain))
            values.append(value)
        self._read(only_arrived=True)
        if owners:
            self._late.append((step, owners, LateNumbers(values)))

    def _read(self, *, only_arrived: bool = False) -> None:
        while self._late and (self._late[0][2].have_arrived or not only_arrived):
            step, owners, late = self._late.pop(0)
            for (number, name), value in zip(owners, late.read(), strict=True):
                curve = self._known.setdefault(number, {}).setdefault(name, [])
                if curve and curve[-1][0] == step:
                    curve.pop()
                curve.append((step, value))

    def stopped(self, number: int, step: int, why: str) -> None:
        self._left[number] = step, why
        self._steps[number] = step

    def interrupted(self, numbers: Sequence[int], step: int) -> None:
        self.trained_to(numbers, step)
        self._cut.update(numbers)

    def diverged(self, numbers: Sequence[int]) -> None:
        """Their training was in vain, to the end or until they left."""
        self._diverged.update(numbers)

    def stopped_steps(self) -> dict[int, int]:
        return {number: step for number, (step, _) in self._left.items()}

    @property
    def curves(self) -> Curves:
        """For each variant and metric: (step, value)."""
        self._read()
        return self._known

    @property
    def monitor(self) -> str | None:
        """The metric that variants are compared by: as told, or a usual one that is logged."""
        if self._monitor is not None:
            return self._monitor
        logged = {name for curves in self.curves.values() for name in curves}
        validated = sorted((name for name in logged if name.startswith("val")), key=_by_loss)
        order = (*_VALIDATION_LOSSES, *validated, *_TRAINING_LOSSES, *sorted(logged))
        return next((name for name in order if name in logged), None)

    @property
    def unknown_monitor(self) -> str | None:
        """What to say of a metric that was asked for and is not logged."""
        logged = sorted({name for curves in self.curves.values() for name in curves})
        if self._monitor is None or self._monitor in logged:
            return None
        return (
            f"monitor={self._monitor} is not logged, so that the leaderboard goes by number; the model logs "
            f"{', '.join(logged) or 'nothing'}"
        )

    @property
    def mode(self) -> str:
        return self._mode or direction(self.monitor or "", self.modes)

    def best(self, number: int, monitor: str | None = None) -> tuple[float, int] | None:
        """The best value of a metric, and its step."""
        name = monitor or self.monitor
        found: tuple[float, int] | None = None
        mode = self.mode if name == self.monitor else direction(name or "", self.modes)
        for step, value in self.curves.get(number, {}).get(name or "", []):
            if not math.isnan(value) and (found is None or better(value, found[0], mode)):
                found = value, step
        return found

    def leader(self, numbers: Sequence[int]) -> int:
        """The variant whose best value is the best; the first where none has one."""
        leading, value = numbers[0], math.nan
        for number in numbers:
            best = self.best(number)
            if best is not None and better(best[0], value, self.mode):
                leading, value = number, best[0]
        return leading

    def leaderboard(self) -> Leaderboard:
        rows = []
        for number, choice in enumerate(self._choices):
            curves = self.curves.get(number, {})
            best = self.best(number)
            rows.append(
                Row(
                    number=number,
                    choice=dict(choice),
                    status=self._status(number),
                    has_diverged=number in self._diverged,
                    steps=self._steps.get(number, 0),
                    best=None if best is None else best[0],
                    best_step=None if best is None else best[1],
                    last={name: curve[-1][1] for name, curve in curves.items()},
                )
            )
        return Leaderboard.ranked(rows, monitor=self.monitor, mode=self.mode)

    def _status(self, number: int) -> str:
        if number in self._left:
            why = self._left[number][1]
            return f"{why}, {DIVERGED}" if number in self._diverged else why
        if number in self._cut:
            return "interrupted"
        if number in self._diverged:
            return DIVERGED
        return TRAINED if number in self._steps else "waiting"

    @contextmanager
    def listening(self, trainer: Any) -> Iterator[None]:
        """Within the block, what the trainer's variants log is noted."""
        callback = _Listener(self)
        trainer.callbacks.insert(0, callback)  # before those that save
        try:
            yield
        finally:
            trainer.callbacks.remove(callback)

    def trained_to(self, numbers: Sequence[int], step: int) -> None:
        for number in numbers:
            if number not in self._left:
                self._steps[number] = step

    def state_dict(self) -> dict[str, Any]:
        left = {number: list(those) for number, those in self._left.items()}
        return {"curves": self.curves, "steps": self._steps, "left": left, "diverged": sorted(self._diverged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._late.clear()
        self._noted.clear()
        self._known = {
            number: {name: [(step, value) for step, value in curve] for name, curve in curves.items()}
            for number, curves in state["curves"].items()
        }
        self._steps = dict(state["steps"])
        self._left = {number: (step, why) for number, (step, why) in state["left"].items()}
        self._diverged = set(state.get("diverged", ()))


def has_diverged(module: nn.Module) -> bool:
    """Whether a weight that is trained is no finite number."""
    trained = [one.detach() for one in module.parameters() if one.requires_grad and one.numel()]
    dense = [torch.view_as_real(one) if one.is_complex() else one for one in trained if one.layout == torch.strided]
    return not all(bool(bound.isfinite()) for one in dense for bound in one.aminmax())  # NaN is its own bound


def _by_loss(name: str) -> tuple[bool, str]:
    """Losses first."""
    return "loss" not in name.lower(), name


def _is_same(value: Tensor, noted: Tensor, was: int) -> bool:
    """Lightning keeps what was logged, and says it again. As long as a tensor is kept here, no other lies there."""
    return value.data_ptr() == noted.data_ptr() and value.dtype == noted.dtype and version(value) == was


class _Listener(L.Callback):
    def __init__(self, records: VariantRecords) -> None:
        self._records = records
        self._step = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        has_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if has_stepped and self._step % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
            self._note(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer)  # what the last epoch's end has logged after this callback was told

    def _note(self, trainer: L.Trainer) -> None:
        self._records.note(metrics_of_variants(trainer), trainer.global_step)
