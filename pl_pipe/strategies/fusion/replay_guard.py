"""What a step may not read or change if it is to run again without its Python.

A replay computes with other tensors, and with nothing else that is new. So the number of the batch, the trainer's state
and the optimizer must not be read; what the step changes besides tensors would not be changed again; and settings that
someone changes between steps end the recording.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from operator import is_
from typing import Any

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_pipe.errors import FusionError
from pl_pipe.fusion.settings import stamp
from pl_pipe.profiling.preserve import OwnGenerators, host_draws
from pl_pipe.strategies.fusion.array_steps import LIGHTNINGS
from pl_pipe.strategies.fusion.step_undo import Reads, UsersParts
from pl_pipe.tensors.operations import user_line
from pl_pipe.tensors.plain_state import is_atom

_TRAINER = "_trainer"
_OWN = ("optimizers", "lr_schedulers")
_SIMPLE = (int, float, str, bool, type(None))
_GONE = object()
_CONSTANT = frozenset(
    (
        *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating"),
        *("max_epochs", "max_steps", "estimated_stepping_batches", "num_training_batches"),
        *("world_size", "num_devices", "num_nodes", "is_global_zero", "global_rank", "local_rank", "node_rank"),
        *("precision", "gradient_clip_val"),
    )
)
"""Of the trainer: what stays as it is while a model is trained."""
_USES = (
    *("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow", "neg", "abs", "invert"),
    *("radd", "rsub", "rmul", "rfloordiv", "rtruediv", "rmod", "rpow", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "index", "str", "repr", "format"),
)


class _Number(int):
    """A batch's number, not to be used."""


def _refusing(*_: Any) -> Any:
    raise FusionError(f"{user_line()}: the step reads the batch's number, which a replay does not know")


for _use in _USES:
    setattr(_Number, f"__{_use}__", _refusing)


class _Trainer:
    """The trainer's constants."""

    def __init__(self, trainer: Any) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        if name not in _CONSTANT:
            raise FusionError(f"{user_line()}: the step reads trainer.{name}, which a replay does not know")
        return getattr(object.__getattribute__(self, "_trainer"), name)


def unread_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The step's arguments, with numbers beside the batch that it cannot use."""
    return (*args[:1], *(_Number(value) if type(value) is int else value for value in args[1:]))


@contextmanager
def guarded(module: L.LightningModule, reads: Reads) -> Iterator[None]:
    """Within the block the module's Python is watched, and what it reads is noted."""
    stored = vars(module)
    before = {name: stored[name] for name in (_TRAINER, *_OWN) if name in stored}
    stored[_TRAINER] = _Trainer(before.get(_TRAINER))
    for name in _OWN:
        stored[name] = _refusal(f"self.{name}()")
    drawn = host_draws()
    parts = UsersParts(module)
    own = OwnGenerators(parts.generators)
    parts.refuse_iterators()
    try:
        with parts.reads_noted() as found:
            yield
        reads.update(found)
    finally:
        for name in (_TRAINER, *_OWN):
            stored.pop(name, None)
        stored.update(before)
    if own.have_drawn():
        raise FusionError(
            "the step draws from a generator that is an attribute of the module, which a replay would not"
        )
    if host_draws() != drawn:
        raise FusionError("the step draws from Python's or NumPy's random numbers, which a replay would not")


def refuse_reentrant(loss: Tensor) -> None:
    """Checkpointing of the older kind runs a backward within the backward, which asks for all gradients or none."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise FusionError("the step has a reentrant checkpoint; set use_reentrant=False")
        left.extend(following for following, _ in node.next_functions)


def refuse_hooks(module: L.LightningModule) -> None:
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise FusionError(f"{name} has a hook for when its gradient is there, which a replay would not call")


class Watched:
    """Settings of modules: numbers, texts, tensors, containers and objects among their attributes, and parameters and
    buffers, which may be frozen, replaced or given other memory."""

    def __init__(self, modules: Sequence[L.LightningModule]) -> None:
        self._seen: list[tuple[Any, str, Any]] = []
        self._counts: list[tuple[dict[str, Any], int]] = []
        self._stores: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        """Parameters and buffers, where modules have them."""
        self._parts = [UsersParts(module) for module in modules]
        self._held = [parts.state() for parts in self._parts]
        for module in modules:
            for part in module.modules():
                if isinstance(part, Metric | MetricCollection):  # which count for themselves
                    continue
                stored = vars(part)
                own = part is module
                self._counts.append((stored, len(stored)))
                self._seen.extend(
                    (stored, name, value)
                    for name, value in stored.items()
                    if isinstance(value, (*_SIMPLE, Tensor)) and not (own and name in LIGHTNINGS)
                )
                self._stores.extend(
                    (store, tuple(store.values())) for store in (part._parameters, part._buffers) if store
                )
            hyper_parameters = module.hparams
            self._seen.extend((hyper_parameters, name, value) for name, value in hyper_parameters.items())
        for kind in {kind for module in modules for part in module.modules() for kind in type(part).__mro__}:
            self._seen.extend(_class_settings(kind))
        self._stamped = [
            (vars(part), name, stamp(value))
            for module in modules
            for part in module.modules()
            for name, value in vars(part).items()
            if _is_elsewhere(part, name, value)
        ]
        self._tensors = [tensor for _, kept in self._stores for tensor in kept if tensor is not None]
        self._frozen = self._needs()
        self._places = self._pointers()

    def _needs(self) -> list[bool]:
        return [tensor.requires_grad for tensor in self._tensors]

    def _pointers(self) -> list[int]:
        """Of the memory that a captured graph reads."""
        return [tensor.data_ptr() for tensor in self._tensors]

    def watch_reads(self, reads: Sequence[Reads]) -> None:
        """From now on: of containers, objects and what is in tensors, what each module's step has read; hooks may fill
        others."""
        held = [parts.state_of(of_one) for parts, of_one in zip(self._parts, reads, strict=True)]
        self._held = [state for state in held if state.modules]

    def changed(self) -> str | None:
        """The name of a setting that is not what it was."""
        for stored, name, value in self._seen:
            now = stored.get(name, _GONE)
            if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor) or now != value):
                return name
        for store, kept in self._stores:
            if len(store) != len(kept) or not all(map(is_, store.values(), kept)):
                return next(iter(store), "a parameter")
        if self._needs() != self._frozen:
            return "requires_grad"
        if self._pointers() != self._places:
            return "the memory of a parameter"
        for stored, name, was in self._stamped:
            if stamp(stored.get(name)) != was:
                return name
        for state in self._held:
            for _, name in state.changed(_is_same):
                return name
        return None

    def added(self) -> bool:
        """Whether a module has attributes that it had not."""
        return any(len(stored) != count for stored, count in self._counts)


def _is_elsewhere(part: nn.Module, name: str, value: Any) -> bool:
    """What users put into torch's modules, or where an object has no dictionary."""
    if type(part).__module__.startswith("torch.nn.modules."):
        return isinstance(value, dict | list | set) and not name.startswith("_")
    return is_dataclass(value) and not hasattr(value, "__dict__")


def _class_settings(kind: type) -> list[tuple[Any, str, Any]]:
    """Of a user's class, which a hook may set for all its modules."""
    if kind.__module__.partition(".")[0] in ("torch", "torchmetrics", "lightning", "builtins"):
        return []
    return [
        (vars(kind), name, value)
        for name, value in vars(kind).items()
        if isinstance(value, _SIMPLE) and not name.startswith("__")
    ]


def _is_same(now: Any, was: Any) -> bool:
    return now is was or (is_atom(now) and is_atom(was) and bool(now == was))


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FusionError(f"{user_line()}: the step reads {what}, which a replay does not know")

    return refuse
