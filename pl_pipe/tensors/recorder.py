"""Records the layers of one step while the user's own Python runs it. model -> *recorder* -> Recording.

    with Recorder(model, batch) as recorder:
        loss = model.training_step(batch, 0)
    recording = recorder.recording()

Nothing is traced or rewritten. Leaf modules are layers; so are operations outside them that take a parameter, a buffer
or a layer's output. What depends on the batch alone (masks, shifted tokens) or on nothing is *free*: every rank of a
pipeline computes it for itself, so it belongs to the step's input.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from pl_pipe.errors import ProfileError
from pl_pipe.tensors.interception import functions_applied_through, leaves_called_through, taken_off
from pl_pipe.tensors.lineage import Lineage, root_of_view, version
from pl_pipe.tensors.operations import FREE_OUTPUTS, NO_LAYERS, VALUE_READS, operation_name, user_line
from pl_pipe.tensors.recording import RecordedLayer, RecordedRead, Recording, assemble
from pl_pipe.tensors.saved import SavedBytes
from pl_pipe.tensors.trees import size_bytes, tensors_in

INPUT = 0
_CHECKPOINT = "torch.utils.checkpoint"


class LayerWatch(Protocol):
    """Stands by while layers run, to time them."""

    def start(self) -> None:
        """Something is about to compute: a layer, or an operation on free tensors."""

    def stop(self) -> None:
        """It has computed."""

    def credit(self, layer: int, module: nn.Module | None) -> None:
        """What just computed was this layer (or, with INPUT, free)."""

    def own(self, layer: int, node: Node) -> None:
        """The layer's backward begins where autograd comes to this node."""


class _Unwatched:
    def start(self) -> None: ...

    def stop(self) -> None: ...

    def credit(self, layer: int, module: nn.Module | None) -> None: ...

    def own(self, layer: int, node: Node) -> None: ...


@dataclass
class _Taken:
    """What a call takes: outputs of layers, tensors of the batch, parameters, and whether any of it is a layer's."""

    sources: set[int] = field(default_factory=set)
    parameters: dict[str, None] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    """Tensors that every rank has, by id."""
    depends: bool = False


class Recorder(TorchFunctionMode):
    """One step's layers, dependencies, sizes and reads; use a new one for every step."""

    def __init__(
        self, model: nn.Module, batch: Any = None, *, watch: LayerWatch | None = None, measure_memory: bool = True
    ) -> None:
        super().__init__()
        refuse_lazy(model)
        self._model = model
        self._watch: LayerWatch = watch or _Unwatched()
        self._parameters = {id(tensor): (name, tensor) for name, tensor in model.named_parameters()}
        self._buffers = {id(tensor): tensor for tensor in model.buffers()}
        self._lineage = Lineage()
        sizes = tuple(size_bytes(tensor) for tensor in tensors_in(batch)) or (0,)
        self._layers = [RecordedLayer(module="", description="Input", sources=frozenset(), output_bytes=sizes)]
        self._reads: list[RecordedRead] = []
        state = (*(tensor for _, tensor in self._parameters.values()), *self._buffers.values())
        self._saved = SavedBytes(state) if measure_memory else None
        self._thread = threading.get_ident()
        self._inside_layer = False
        self._called_inside: list[nn.Module] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(leaves_called_through(self._model, self._leaf))
            stack.enter_context(functions_applied_through(self._autograd_function))
            if self._saved is not None:
                stack.enter_context(self._saved.hooks())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            self._stack.close()
            self._note_saved(len(self._layers) - 1)

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """Module and description of every layer that ran: equal for steps that did the same."""
        return tuple((layer.module, layer.description) for layer in self._layers)

    def recording(self) -> Recording:
        sizes = {name: size_bytes(tensor) for name, tensor in self._parameters.values()}
        return assemble(self._layers, self._reads, sizes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if name in NO_LAYERS or self._inside_layer:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if name in VALUE_READS:
            self._note_read(given)
            return func(*args, **kwargs)
        return self._operation(name, partial(func, *args, **kwargs), given)

    def _leaf(
        self, module: nn.Module, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A leaf module is called: one layer, whatever it does inside."""
        if threading.get_ident() != self._thread:
            return plain(*args, **kwargs)
        if self._inside_layer:
            self._called_inside.append(module)
            return plain(*args, **kwargs)
        with taken_off(self):
            given, own = tensors_in((args, kwargs)), _tensors_of(module)
            taken = self._taken(given, own)
            versions = [version(tensor) for tensor in (*given, *own)]
            self._called_inside.clear()
            out = self._run(partial(plain, *args, **kwargs))
            for other in self._called_inside:  # through a reference that is no registered child
                self._take(_tensors_of(other), taken, own=True)
            changed = [t for t, old in zip((*given, *own), versions, strict=True) if version(t) != old]
            known = {id(tensor) for tensor in own}
            kept = [tensor for tensor in _tensors_of(module) if id(tensor) not in known]
            description = " ".join(repr(module).split())
            self._add_layer(taken, [*tensors_in(out), *kept], changed, description, name, module)
            return out

    def _autograd_function(
        self, function: type, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A custom autograd function is applied: an operation like any other.

        Except for activation checkpoints: there the layers are those inside, and the last one's backward has them
        run again.
        """
        if threading.get_ident() != self._thread or self._inside_layer:
            return plain(*args, **kwargs)
        if function.__module__ == _CHECKPOINT:
            out = plain(*args, **kwargs)
            with taken_off(self):
                for tensor in tensors_in(out):
                    for layer in self._lineage.sources(tensor):
                        self._own_nodes([tensor], layer)
            return out
        with taken_off(self):
            return self._operation(function.__name__, partial(plain, *args, **kwargs), tensors_in((args, kwargs)))

    def _operation(self, name: str, compute: Callable[[], Any], given: list[Tensor]) -> Any:
        taken = self._taken(given)
        versions = [version(tensor) for tensor in given]
        out = self._run(compute)
        outputs = tensors_in(out)
        changed = [tensor for tensor, old in zip(given, versions, strict=True) if version(tensor) != old]
        if taken.depends and (outputs or changed):
            free = {id(out[index]) for index in FREE_OUTPUTS.get(name, ())}
            self._add_layer(taken, [tensor for tensor in outputs if id(tensor) not in free], changed, name)
        elif outputs:
            self._watch.credit(INPUT, None)
            self._note_saved(INPUT)
        return out

    def _run(self, compute: Callable[[], Any]) -> Any:
        self._note_saved(len(self._layers) - 1)  # by functions nobody saw
        self._inside_layer = True
        self._watch.start()
        try:
            out = compute()
        finally:
            self._inside_layer = False
        self._watch.stop()
        return out

    def _taken(self, given: Iterable[Tensor], own: Iterable[Tensor] = ()) -> _Taken:
        taken = _Taken()
        self._take(own, taken, own=True)
        self._take(given, taken)
        return taken

    def _take(self, tensors: Iterable[Tensor], taken: _Taken, *, own: bool = False) -> None:
        """Adds what `tensors` come from; constants that a module keeps as its `own` are no input of the step."""
        for tensor in tensors:
            sources = self._lineage.sources(tensor)
            taken.sources |= sources
            owned = tensor if sources or self._is_state(tensor) else root_of_view(tensor)
            parameter, _ = self._parameters.get(id(owned), (None, None))
            if parameter is not None:
                taken.parameters[parameter] = None
            if sources or self._is_state(owned):
                taken.depends = True
            elif not own:
                taken.free.add(id(tensor))

    def _is_state(self, tensor: Tensor) -> bool:
        return id(tensor) in self._parameters or id(tensor) in self._buffers

    def _add_layer(
        self,
        taken: _Taken,
        outputs: Sequence[Tensor],
        changed: Sequence[Tensor],
        description: str,
        name: str = "",
        module: nn.Module | None = None,
    ) -> None:
        sources = frozenset(taken.sources | ({INPUT} if taken.free else set()))
        layer = self._lineage.add_layer(sources)
        self._watch.credit(layer, module)
        altered = {id(tensor) for tensor in changed}
        values: dict[int, Tensor] = {}
        for tensor in (*outputs, *changed):
            untouched = id(tensor) in taken.free and id(tensor) not in altered  # given and handed on: still free
            if not untouched and not self._is_state(tensor):
                self._lineage.made(tensor, layer)
                values[id(tensor)] = tensor
        for tensor in changed:
            self._lineage.written(tensor, layer)
            if not self._is_state(tensor):
                values[id(tensor)] = root_of_view(tensor)  # what was changed through a view is needed whole
        self._own_nodes([*values.values(), *changed], layer)
        sizes = {id(tensor): size_bytes(tensor) for tensor in values.values()}
        self._layers.append(
            RecordedLayer(name, description, sources, tuple(taken.parameters), tuple(sizes.values()) or (0,))
        )
        self._note_saved(layer)

    def _own_nodes(self, tensors: Iterable[Tensor], layer: int) -> None:
        for tensor in tensors:
            node = self._lineage.own(tensor, layer)
            if node is not None:
                self._watch.own(layer, node)

    def _note_saved(self, layer: int) -> None:
        if self._saved is not None:
            entry = self._layers[layer]
            entry.activation_bytes = (entry.activation_bytes or 0) + self._saved.take()

    def _note_read(self, tensors: Iterable[Tensor]) -> None:
        sources = [max(found) for tensor in tensors if (found := self._lineage.sources(tensor))]
        for source in sources:
            self._reads.append(RecordedRead(source, len(self._layers) - 1, user_line()))


def refuse_lazy(model: nn.Module) -> None:
    """Modules that take their shapes from the first batch have nothing to record before it."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ProfileError(f"{name} of a lazy module has no shape yet; run one batch through the model first")


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that a module keeps as plain attributes (weights a hook computed, a state)."""
    found: dict[int, Tensor] = {}
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                found[id(tensor)] = tensor
        for value in vars(part).values():
            if isinstance(value, Tensor):
                found[id(value)] = value
            elif isinstance(value, list | tuple):
                found.update({id(item): item for item in value if isinstance(item, Tensor)})
    return list(found.values())
