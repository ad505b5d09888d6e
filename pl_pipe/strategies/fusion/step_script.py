"""What a recorded step does in Python, after its numbers are there: logs, metrics, what it returns.

step, once     self.log("train_loss", loss); self.accuracy(logits, y); return loss
the script     log "train_loss" value 0; call `accuracy` with values 1 and 2; return value 0
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from pl_pipe.errors import FusionError
from pl_pipe.strategies.fusion.variant_log import VariantLog
from pl_pipe.strategies.fusion.variant_metrics import metric_names
from pl_pipe.tensors.operations import user_line

_CALL = "_compiled_call_impl"  # what nn.Module.__call__ asks for first
_METHODS = ("update", "compute", "reset")


class Later:
    """A metric's answer: it is not known while the step is recorded."""

    def __getattr__(self, name: str) -> Any:
        raise FusionError(f"{user_line()}: the step uses a metric's value ({name}), which a replay has only afterwards")


@dataclass(frozen=True)
class _Value:
    """In place of a tensor: its place among the step's values."""

    index: int


@dataclass(frozen=True)
class _MetricName:
    """In place of a metric that is logged as such."""

    name: str


@dataclass(frozen=True)
class _MetricCall:
    name: str
    method: str
    args: Any
    kwargs: Any
    answer: Any
    """What the recording was given: Later, or a mapping of them."""


@dataclass
class StepScript:
    """The same for every variant that the recording stands for; the numbers are each one's own."""

    events: list[dict[str, Any] | _MetricCall]
    """In their order: arguments of `log`, calls of metrics."""
    out: Any
    tensors: list[Tensor] = field(default_factory=list)
    """Of the recording, by their places; emptied by who has taken them."""

    @classmethod
    def of(cls, notes: Sequence[tuple[int, Any]], out: Any, module: L.LightningModule) -> "StepScript":
        """Of what `module` has done while it was recorded."""
        found: dict[int, tuple[int, Tensor]] = {}
        names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}

        def placed(tensor: Tensor) -> _Value:
            return _Value(found.setdefault(id(tensor), (len(found), tensor))[0])

        events = [_mapped(_by_name(event, names), placed, _itself) for _, event in notes]
        script = cls(events, _mapped(out, placed, _itself))
        script.tensors = [tensor for _, tensor in found.values()]
        return script

    def play(
        self, values: Sequence[Tensor], module: L.LightningModule, place: int, log: VariantLog, *, are_own: bool
    ) -> Any:
        """Says and calls all that with one variant's values; gives what its step returns.

        Values that are its `own` change no more: they are no memory of a graph, which the next replay would overwrite.
        """
        answers: dict[int, Any] = {}

        def value(one: _Value) -> Tensor:
            return values[one.index]

        def answer(later: Later) -> Any:
            return answers[id(later)]

        for event in self.events:
            if isinstance(event, _MetricCall):
                metric: Any = module.get_submodule(event.name)
                args, kwargs = _mapped((event.args, event.kwargs), value, answer)
                given = (metric if event.method == _CALL else getattr(metric, event.method))(*args, **kwargs)
                _remember(answers, event.answer, given)
            else:
                logged = event["value"]
                if isinstance(logged, _MetricName):
                    logged = module.get_submodule(logged.name)
                log.say([(place, {**event, "value": _mapped(logged, value, answer)})], for_all=False, are_own=are_own)
        return _mapped(self.out, value, answer)

    @property
    def loss_place(self) -> int | None:
        """Which of the values is the loss that the step returns."""
        loss = self.out.get("loss") if isinstance(self.out, Mapping) else self.out
        return loss.index if isinstance(loss, _Value) else None


@contextmanager
def metrics_noted(module: L.LightningModule, notes: list[tuple[int, Any]]) -> Iterator[None]:
    """Within the block calls of the module's metrics are written down among the notes, and not made."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name in metric_names(module):
        metric: Any = module.get_submodule(name)
        for method in (_CALL, *_METHODS):
            before.append((vars(metric), method, vars(metric).get(method)))
            vars(metric)[method] = _noting(name, metric, method, notes)
    try:
        yield
    finally:
        for stored, method, plain in before:
            stored.pop(method, None)
            if plain is not None:
                stored[method] = plain


def _noting(
    name: str, metric: Metric | MetricCollection, method: str, notes: list[tuple[int, Any]]
) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Any:
        answer: Any = None
        if method in (_CALL, "compute"):
            of_several = isinstance(metric, MetricCollection)
            if of_several and any(isinstance(one, WrapperMetric) for one in metric.values(copy_state=False)):  # type: ignore[operator]
                raise FusionError(f"the collection {name!r} has metrics that may answer with several numbers each")
            answer = {str(key): Later() for key in metric.keys(keep_base=False)} if of_several else Later()  # type: ignore[operator]
        notes.append((0, _MetricCall(name, method, args, kwargs, answer)))
        return answer

    return note


def _by_name(event: Any, names: Mapping[int, str]) -> Any:
    """A metric object that is logged is each variant's own."""
    if isinstance(event, dict) and isinstance(event["value"], Metric):
        if id(event["value"]) not in names:
            raise FusionError(f"the step logs {event['name']!r} as a metric that is no part of the module")
        return {**event, "value": _MetricName(names[id(event["value"])])}
    return event


def _remember(answers: dict[int, Any], laters: Any, given: Any) -> None:
    if isinstance(laters, Later):
        answers[id(laters)] = given
    elif isinstance(laters, dict):
        if set(laters) != set(map(str, given)):
            raise FusionError(f"a collection of metrics answers {', '.join(given)}, and has {', '.join(laters)}")
        for key, later in laters.items():
            answers[id(later)] = given[key]


def _itself(later: Later) -> Later:
    return later


def _mapped(tree: Any, tensor: Callable[[Any], Any], later: Callable[[Later], Any]) -> Any:
    """Tensors, or what stands for them, and metrics' answers changed; the rest is as it was."""
    if isinstance(tree, Tensor | _Value):
        return tensor(tree)
    if isinstance(tree, Later):
        return later(tree)
    if isinstance(tree, _MetricCall):
        return _MetricCall(
            tree.name, tree.method, _mapped(tree.args, tensor, later), _mapped(tree.kwargs, tensor, later), tree.answer
        )
    if isinstance(tree, dict):
        return {key: _mapped(item, tensor, later) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_mapped(item, tensor, later) for item in tree]
    if isinstance(tree, tuple):
        items = [_mapped(item, tensor, later) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree
