"""`self.log` of every variant, under a name of its own. variant's step or hook -> *log* -> Lightning.

Lightning knows one module, the first variant's; it hears `train_loss/variant_3` from that one.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from pl_pipe.fusion.values import holds_array, split
from pl_pipe.strategies.fusion.variant_names import divided

Note = tuple[int, dict[str, Any]]
"""Place of the variant, arguments of `log`."""
_LOG = "log"
_GONE = object()


class VariantLog:
    """Stands in for the `log` of all modules, until `close`."""

    def __init__(self, modules: Sequence[L.LightningModule], numbers: Sequence[int]) -> None:
        self._modules = list(modules)
        self._numbers = list(numbers)
        self._speaker = modules[0]
        self._plain = type(self._speaker).log
        self._signature = inspect.signature(self._plain)
        self._metrics = [
            {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)} for module in modules
        ]
        self._notes: list[Note] | None = None
        self._for_all = False
        self.in_turns = False
        """Whether a variant's whole step, with all its hooks, comes before the next one's."""
        self._known: dict[tuple[int, str], _Known] = {}
        for place, module in enumerate(self._modules):
            vars(module)[_LOG] = partial(self._hear, place)

    @contextmanager
    def noting(self, *, for_all: bool) -> Iterator[list[Note]]:
        """Within the block nothing is said; with `for_all`, the first module speaks for all of them, in arrays."""
        self._notes, self._for_all = [], for_all
        try:
            yield self._notes
        finally:
            self._notes, self._for_all = None, False

    def say(self, notes: Sequence[Note], *, for_all: bool, are_own: bool = False) -> None:
        """What was noted is told to Lightning; numbers that are its `own`, since nobody changes them, need no copy.

        All that one variant logs comes before the next one's, however the step was computed: numbers that Lightning
        averages over ranks at once meet in the order in which they are said.
        """
        if not for_all:
            for place, arguments in sorted(notes, key=itemgetter(0)):
                self._say(place, arguments, is_own=are_own)
            return
        of_each = [self._of_each(arguments["value"]) for _, arguments in notes]
        for place in range(len(self._modules)):
            for (_, arguments), values in zip(notes, of_each, strict=True):
                self._say(place, {**arguments, "value": values[place]})

    def _of_each(self, value: Any) -> list[Any]:
        """What the first module logs, for each."""
        if isinstance(value, Metric):
            name = self._metrics[0][id(value)]
            return [module.get_submodule(name) for module in self._modules]
        return split(value, len(self._modules)) if holds_array(value) else [value] * len(self._modules)

    def keep(self, places: Sequence[int]) -> None:
        """The others' modules log no more."""
        for place, module in enumerate(self._modules):
            vars(module).pop(_LOG, None)
            if place not in places:
                vars(module)[_LOG] = _unheard
        self._known.clear()
        self._modules = [self._modules[place] for place in places]
        self._numbers = [self._numbers[place] for place in places]
        self._metrics = [self._metrics[place] for place in places]
        for place, module in enumerate(self._modules):
            vars(module)[_LOG] = partial(self._hear, place)

    def close(self) -> None:
        for module in self._modules:
            vars(module).pop(_LOG, None)
        self._known.clear()

    def _hear(self, place: int, *args: Any, **kwargs: Any) -> None:
        if len(args) == 2:  # the usual call, and the cheapest to understand
            arguments = {"name": args[0], "value": args[1], **kwargs}
        else:
            arguments = dict(self._signature.bind(self._speaker, *args, **kwargs).arguments)
            del arguments["self"]
        if self._notes is None:
            self._say(place, arguments)
        else:
            self._notes.append((place, arguments))

    def _say(self, place: int, arguments: dict[str, Any], *, is_own: bool = False) -> None:
        value, fx = arguments["value"], self._modules[place]._current_fx_name
        if fx is not None and fx != self._speaker._current_fx_name:  # Lightning has called this module itself
            before, self._speaker._current_fx_name = self._speaker._current_fx_name, fx
            try:
                self._say(place, arguments, is_own=is_own)
            finally:
                self._speaker._current_fx_name = before
            return
        if self.in_turns:
            self._reset_own(place)
        known = self._known.get((place, arguments["name"]))
        if known is not None and known.say(self._speaker, arguments, is_own=is_own):
            return
        said = {**arguments, "name": f"{arguments['name']}/variant_{self._numbers[place]}"}
        if isinstance(value, Tensor):
            said["value"] = value.detach()
        elif isinstance(value, Metric) and said.get("metric_attribute") is None:
            attribute = self._metrics[place].get(id(value))
            if attribute is not None:
                said["metric_attribute"] = f"variant_{self._numbers[place]}.{attribute}"
        self._plain(self._speaker, **said)
        if isinstance(value, Tensor):
            self._known[place, arguments["name"]] = _Known(self._speaker, arguments, said["name"])

    def _reset_own(self, place: int) -> None:
        """As Lightning does where the first batch's log comes from another hook than the last one; of this variant."""
        trainer, fx = self._speaker.trainer, self._speaker._current_fx_name
        connector: Any = trainer._logger_connector
        if connector.should_reset_tensors(fx):
            for item in trainer._results.values():  # type: ignore[union-attr]
                if item.is_tensor and item.meta.fx == fx and divided(item.meta.name)[1] == self._numbers[place]:
                    item.reset()
            connector._current_fx = fx


class _Known:
    """A number that was logged before, with the same settings: what Lightning checks of it need not be checked again.

    Half a millisecond for each variant and number is more than many a step takes on a GPU.
    """

    def __init__(self, speaker: Any, arguments: Mapping[str, Any], name: str) -> None:
        self._arguments = dict(arguments)
        self._fx = speaker._current_fx_name
        self._results = speaker.trainer._results
        self._key = f"{self._fx}.{name}"

    def say(self, speaker: Any, arguments: dict[str, Any], *, is_own: bool) -> bool:
        """Whether it could be said the short way."""
        value, before = arguments["value"], self._arguments["value"]
        trainer = speaker.trainer
        results, connector = trainer._results, trainer._logger_connector
        if (
            not isinstance(value, Tensor)
            or value.shape != before.shape
            or value.dtype != before.dtype
            or value.device != before.device
            or value.numel() != 1
            or results is not self._results
            or speaker._current_fx_name != self._fx
            or results.dataloader_idx is not None
            or connector.should_reset_tensors(self._fx)
            or self._key not in results
            or any(arguments.get(name, _GONE) != given for name, given in self._arguments.items() if name != "value")
            or len(arguments) != len(self._arguments)
        ):
            return False
        metric = results[self._key]
        if is_own and _is_kept_as_it_is(metric, value):
            metric._update_count += 1
            metric._computed = None
            metric.value = metric._forward_cache = value.squeeze()
            metric.has_reset = False
            return True
        size = results._extract_batch_size(metric, arguments.get("batch_size"), metric.meta)
        metric.forward(value.detach().squeeze(), size)
        metric.has_reset = False
        return True


def _is_kept_as_it_is(metric: Any, value: Tensor) -> bool:
    """Whether all that Lightning does with the number is to copy it. On a GPU the copy is a launch between steps."""
    meta = metric.meta
    return bool(
        meta.on_step and not meta.on_epoch and not meta.sync.should and value.dtype in (torch.float32, torch.float64)
    )


def _unheard(*_: Any, **__: Any) -> None:
    """Of a variant that has left."""
