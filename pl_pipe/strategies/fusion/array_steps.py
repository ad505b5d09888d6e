"""The user's whole step, once, on arrays. batch -> *ArraySteps* -> every variant's loss, gradients, logs.

The first variant's Python runs for all: what it reads must be alike for all, or be an array. So its hyper-parameters
that differ, its optimizer and its scheduler are not to be read while it does; a step that needs them runs another way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from pl_pipe.errors import FusionError
from pl_pipe.fusion import Timed, Usual, VariantArray, comparing
from pl_pipe.fusion.values import split
from pl_pipe.strategies.fusion.settings import AUTO, TIMED
from pl_pipe.strategies.fusion.settings_guard import SettingsGuard
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall, detached, loss_of
from pl_pipe.strategies.fusion.step_undo import StepUndo, all_metrics, no_host_draws, users_parts
from pl_pipe.strategies.fusion.variant_hooks import STAND_INS
from pl_pipe.strategies.fusion.variant_metrics import FusedMetrics, metric_names
from pl_pipe.tensors.arrays import is_array

LIGHTNINGS = frozenset(
    (
        *vars(L.LightningModule()).keys() - comparing.HOOKS,
        *("_hparams", "_hparams_initial", "_hparams_name", "log", "optimizers", "lr_schedulers"),
        *STAND_INS,
    )
)
"""Attributes that are not the user's; hyper-parameters have a guard of their own."""


def array_of(members: Members, layers: str) -> VariantArray[L.LightningModule]:
    metrics = dict.fromkeys(metric_names(members.modules[0]), "a metric, of which each variant has its own")
    names = {**dict.fromkeys(members.fuse_except, "fuse_except"), **metrics}
    chooser = Timed() if _are_timed(layers, members.device) else Usual()
    return VariantArray(
        members.modules, fuse_except=names, streams=members.streams, own=LIGHTNINGS, chooser=chooser,
        runs=lambda: members.turns.taken,
    )  # fmt: skip


def _are_timed(layers: str, device: torch.device) -> bool:
    """Whoever wants the same bits in every run does not want what was quickest this time."""
    if layers != AUTO:
        return layers == TIMED
    deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    return device.type == "cuda" and not deterministic


class ArraySteps:
    name = "array"

    def __init__(self, members: Members, array: VariantArray[L.LightningModule]) -> None:
        self._members = members
        self._array = array
        self._prepare()

    def run(self, call: StepCall) -> list[Any]:
        members, array = self._members, self._array
        metrics = self._called.get(call.hook, self._all_metrics)
        is_new = call.hook not in self._called
        undo = StepUndo(
            members,
            array,
            args=call.args,
            metrics=metrics,
            parts=self._parts,
            weights=is_new and call.trains,
            gradients=call.adds_to_gradients,
        )
        try:
            if is_new:
                self._parts[0].refuse_iterators()
            with members.log.noting(for_all=True) as notes:
                with array.fused() as template, call.context(), self._guard.standing(), self._metrics.routed():
                    out = getattr(template, call.hook)(*call.args, **call.kwargs)
                if call.trains:
                    with self._guard.standing(), no_host_draws():  # hooks may do what a step may not
                        self._backward(out, call.scales)
                undo.refuse_draws(call.hook)
                undo.refuse_own_draws(call.hook)
            outs = [detached(own) for own in split(out, len(members.modules))]
        except Exception:
            undo()
            if call.clear_gradients is not None:
                call.clear_gradients()
            raise
        self._called.setdefault(call.hook, undo.called())
        with call.context():  # where the step would have said it: types may depend on it
            members.log.say(notes, for_all=True)
        return outs

    def keep(self, places: Sequence[int]) -> None:  # noqa: ARG002  # the array is kept by who made it
        self._prepare()

    def release(self) -> None: ...

    def _prepare(self) -> None:
        self._parts = users_parts(self._members)
        self._all_metrics = all_metrics(self._members)
        self._called: dict[str, list[Metric | MetricCollection]] = {}
        self._metrics = FusedMetrics(self._members.modules, self._array)
        self._guard = SettingsGuard(self._members.modules, self._members.turns)

    def _backward(self, out: Any, scales: Sequence[Tensor | float]) -> None:
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if loss is None:
            loss_of(out)  # Lightning's own error where the mapping has no loss
            return
        if not is_array(loss):
            raise FusionError("training_step returns a loss that does not depend on the variants' parameters")
        loss_of(split(out, len(self._members.modules))[0])
        weights = torch.stack([torch.as_tensor(scale, dtype=loss.dtype, device=loss.device) for scale in scales])
        if loss.ndim != 1:
            weights = weights.view(-1, *([1] * (loss.ndim - 1))).expand_as(loss)
        torch.autograd.backward(loss, weights)
