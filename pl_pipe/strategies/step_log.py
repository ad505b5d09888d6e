"""What a step logs, on the rank that reports. training_step -> *StepLog* -> Lightning.

All ranks run the user's step, and only the last stage has its results. There `self.log` is heard during the step and
answered after it, once for all micro-batches of a batch. The other ranks log nothing: they are told the metrics when
the pipeline is drained.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from pl_pipe.runtime.micro_batches import REDUCTIONS, mean_of
from pl_pipe.tensors.trees import map_tensors


class StepLog:
    """Stands in for a LightningModule's `log`, which `log_dict` calls too."""

    def __init__(self, module: L.LightningModule, *, reports: bool) -> None:
        self._module = module
        self._reports = reports
        self._plain = type(module).log
        self._signature = inspect.signature(self._plain)
        self._step: Any = None
        self._share = 1.0
        self._heard: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        vars(module)["log"] = self._hear

    def begin(self, step: Any, share: float = 1.0) -> None:
        """The step of a micro-batch begins, which is such a share of its batch."""
        self._step, self._share = step, share

    def end(self) -> None:
        """The batch's steps are over: Lightning hears what they logged."""
        self._step = None
        heard, self._heard = self._heard, {}
        for calls in heard.values():
            self._plain(self._module, **(calls[0][1] if len(calls) == 1 else _one_for_all(calls)))

    def close(self) -> None:
        vars(self._module).pop("log", None)

    def _hear(self, *args: Any, **kwargs: Any) -> None:
        if self._step is None:  # in a hook between steps
            if self._reports:
                self._plain(self._module, *args, **{**kwargs, "sync_dist": True})
            return
        arguments = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        del arguments["self"]
        arguments["sync_dist"] = True  # costs nothing with one reporter, and Lightning would recommend it
        arguments["value"] = map_tensors(arguments["value"], self._step.bring)
        if self._reports:
            self._heard.setdefault(arguments["name"], []).append((self._share, arguments))


def _one_for_all(calls: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """The call that a step on the whole batch would have made."""
    values = [arguments["value"] for _, arguments in calls]
    arguments = dict(calls[0][1])
    if arguments.get("batch_size") is not None:  # log_dict passes None on
        arguments["batch_size"] = sum(other["batch_size"] for _, other in calls)
    if all(isinstance(value, Tensor | float | int) for value in values):
        tensors = [torch.as_tensor(value, dtype=torch.get_default_dtype()) for value in values]
        reduce_fx = arguments.get("reduce_fx", "mean")
        reduce = REDUCTIONS.get(getattr(reduce_fx, "__name__", reduce_fx))
        total = sum(share for share, _ in calls)  # some micro-batches may not have logged it
        shares = [share / total for share, _ in calls]
        arguments["value"] = mean_of(tensors, shares) if reduce is None else reduce(torch.stack(tensors))
    return arguments
