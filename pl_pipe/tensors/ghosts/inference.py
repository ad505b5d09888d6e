"""Results of operations that run elsewhere: specs from fake tensors, once for each signature.

Fake tensors pretend to be on the rank's device, so that autocast, `.to(device)` and `requires_grad` come out as they
would. What the shape of a result depends on must be known here; where that is a tensor of the batch (a mask, lengths)
the operation runs on zeros instead, for every batch anew.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts.calls import Call
from pl_pipe.tensors.ghosts.specs import TensorSpec, hashable, once_each
from pl_pipe.tensors.lineage import storage_key
from pl_pipe.tensors.operations import FREE_OUTPUTS, user_line
from pl_pipe.tensors.trees import map_tensors, tensors_in

_SHAPE_KEEPING = frozenset({"batch_norm", "layer_norm", "group_norm", "relu", "gelu", "silu", "hardswish"})
_GROUPED_PRODUCTS = ("_grouped_mm", "grouped_mm")  # of experts: fakes know of bfloat16 alone
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Where torch is built for CUDA and there is none, the first fake mode replaces the process's device guard, and a thread
# that computes meanwhile (autograd's, another rank's) may crash. So the first one is here, before there are any.
with FakeTensorMode():
    pass

# torch looks up an operation's Python side when it is first used, and fails an assertion (PyHandleCache.h) where two
# threads do so at once.
_ONE_AT_A_TIME = threading.RLock()


class OutputSpec(NamedTuple):
    spec: TensorSpec
    view_of: int | None
    """Which of the call's tensors it shares memory with."""
    is_argument: bool = False
    """It is that very tensor, changed in place."""


class Result(NamedTuple):
    """What a call returns: `tree` with a placeholder for each tensor."""

    tree: Any
    outputs: dict[int, OutputSpec]
    """By the placeholder's id; tensors of `tree` that are not in it follow from the batch and are real."""
    changed: tuple[int, ...] = ()
    """Which of the call's tensors are changed in place, by an operation whose name does not tell."""

    def rebuilt(self, make: Callable[[OutputSpec], Tensor]) -> Any:
        outputs = self.outputs
        if isinstance(self.tree, Tensor) and id(self.tree) in outputs:
            return make(outputs[id(self.tree)])

        def made(tensor: Tensor) -> Tensor:
            return make(outputs[id(tensor)]) if id(tensor) in outputs else tensor

        return map_tensors(self.tree, once_each(made))


_REMEMBERED = 50_000


class Inference:
    """Remembers results by signature; one for each rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[tuple[TensorSpec, int], Tensor] = {}
        self._results: dict[Any, Result] = {}
        self.inferred = 0

    def result(self, call: Call, specs: Sequence[TensorSpec], modes: Any) -> Result:
        """What the call returns; `specs` are those of its tensors."""
        if call.is_shaped_by_free_values:
            return self._on_zeros(call)
        if call.name in _GROUPED_PRODUCTS and len(specs[0].shape) == 2 and len(specs[1].shape) == 3:
            return _grouped_product(call, specs)
        if call.name in _RECURRENT and len(specs) > 2 and call.values[1] is None and len(specs[1].shape) == 1:
            return _packed_recurrent(call, specs)
        key = (call.identity, call.structure, tuple(specs), modes)
        known = hashable(key)
        if known and key in self._results:
            return self._results[key]
        self.inferred += 1
        result = (
            _like_the_first(call, specs, modes) or _ctc_loss(call, specs, modes) or self._on_fakes(call, specs, modes)
        )
        if known:
            if len(self._results) >= _REMEMBERED:  # numbers that change in every step, such as an annealed weight
                self._results.clear()
            self._results[key] = result
        return result

    def _on_fakes(self, call: Call, specs: Sequence[TensorSpec], modes: Any) -> Result:
        with _ONE_AT_A_TIME, torch.inference_mode(False), torch.set_grad_enabled(modes[0]), self._fake_mode:
            fakes: dict[int, Tensor] = {}
            for tensor, spec in zip(call.tensors, specs, strict=True):
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = self._fake(spec, len(fakes))
            versions = {key: fake._version for key, fake in fakes.items()}
            args, kwargs = map_tensors(call.arguments, lambda tensor: fakes[id(tensor)])
            try:
                out = torch.clone(args[0]) if call.name == "deepcopy" else call.function(*args, **kwargs)
            except Exception as error:
                shown = ", ".join(str(spec) for spec in specs)
                raise StageError(
                    f"{user_line()}: what {call.name}({shown}) returns cannot be told without running it, which "
                    f"another stage does ({type(error).__name__}: {error}); give it a fake implementation "
                    f"(torch.library.register_fake), or keep all that uses it on one stage"
                ) from error
        memory = {storage_key(fakes[id(tensor)]): index for index, tensor in reversed(list(enumerate(call.tensors)))}
        changed = {id(fake) for key, fake in fakes.items() if fake._version != versions[key]}
        if changed:
            self._fakes.clear()  # they may have another shape now
        outputs: dict[int, OutputSpec] = {}

        def placeholder(tensor: Tensor) -> Tensor:
            stand_in = torch.empty(0)
            source = memory.get(storage_key(tensor))
            outputs[id(stand_in)] = OutputSpec(TensorSpec.of(tensor), source, id(tensor) in changed)
            return stand_in

        tree = map_tensors(out, once_each(placeholder))
        written = tuple(index for index, tensor in enumerate(call.tensors) if id(fakes[id(tensor)]) in changed)
        return Result(tree, outputs, written)

    def _fake(self, spec: TensorSpec, ordinal: int) -> Tensor:
        key = (spec, ordinal)
        if key not in self._fakes:
            with torch.enable_grad():
                fake = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
                if spec.requires_grad:  # no leaf: in-place operations on the output of another layer are allowed
                    copied = fake.requires_grad_().clone()
                    fake = copied if copied.stride() == spec.stride else torch.ops.aten.alias.default(fake)
                self._fakes[key] = fake
        return self._fakes[key]

    def _on_zeros(self, call: Call) -> Result:
        free = {id(tensor) for tensor, value in zip(call.tensors, call.values, strict=True) if value is None}

        def zeros(tensor: Tensor) -> Tensor:
            if id(tensor) in free:
                return tensor
            return torch.zeros((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)

        args, kwargs = map_tensors(call.arguments, zeros)
        with torch.no_grad():
            out = call.function(*args, **kwargs)
        kept = {id(out[index]) for index in FREE_OUTPUTS.get(call.name, ())}
        with_gradient = call.needs_gradient
        outputs = {
            id(tensor): OutputSpec(
                TensorSpec.of(tensor)._replace(requires_grad=with_gradient and tensor.is_floating_point()), None
            )
            for tensor in tensors_in(out)
            if id(tensor) not in kept
        }
        return Result(out, outputs)


def _like_the_first(call: Call, specs: Sequence[TensorSpec], modes: Any) -> Result | None:
    """Common functions whose result has the spec of their first argument, for which no fake need run."""
    _, _, autocast = modes
    in_place = any(argument is True for argument in call.arguments[0][1:]) and call.name != "batch_norm"
    if call.name not in _SHAPE_KEEPING or autocast is not None or in_place:
        return None
    first = specs[0]
    if first.stride != _contiguous(first.shape) or any(spec.dtype != first.dtype for spec in specs):
        return None
    stand_in = torch.empty(0)
    spec = first._replace(requires_grad=call.needs_gradient)
    updates_statistics = call.name == "batch_norm" and len(specs) > 2 and _argument(call, 5, "training", False)
    return Result(stand_in, {id(stand_in): OutputSpec(spec, None)}, (1, 2) if updates_statistics else ())


def _argument(call: Call, position: int, name: str, default: Any) -> Any:
    args, kwargs = call.arguments
    return args[position] if len(args) > position else kwargs.get(name, default)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _grouped_product(call: Call, specs: Sequence[TensorSpec]) -> Result:
    """Rows, each multiplied by the matrix of its group: (rows, inner) and (groups, inner, columns)."""
    rows, columns = specs[0].shape[0], specs[1].shape[2]
    stand_in = torch.empty(0)
    spec = TensorSpec((rows, columns), (columns, 1), specs[0].dtype, call.needs_gradient)
    return Result(stand_in, {id(stand_in): OutputSpec(spec, None)})


def _ctc_loss(call: Call, specs: Sequence[TensorSpec], modes: Any) -> Result | None:
    """A number, or one a sample: (steps, samples, classes) or (steps, classes). A fake would ask for the lengths."""
    if call.name != "ctc_loss":
        return None
    is_apart = _argument(call, 5, "reduction", "mean") in ("none", 0)
    shape = specs[0].shape[1:-1] if is_apart else ()
    dtype = specs[0].dtype if modes[2] is None else torch.promote_types(specs[0].dtype, torch.float32)
    stand_in = torch.empty(0)
    spec = TensorSpec(shape, _contiguous(shape), dtype, call.needs_gradient)
    return Result(stand_in, {id(stand_in): OutputSpec(spec, None)})


def _packed_recurrent(call: Call, specs: Sequence[TensorSpec]) -> Result:
    """A recurrent function on a packed sequence: (data, batch_sizes, hidden states, weights, …, bidirectional)."""
    with_gradient = call.needs_gradient
    hidden = [spec for spec in specs[2:] if len(spec.shape) == 3]
    directions = 2 if call.arguments[0][-1] else 1
    width = hidden[0].shape[2] * directions
    data = TensorSpec((specs[0].shape[0], width), (width, 1), specs[0].dtype, with_gradient)
    tree = tuple(torch.empty(0) for _ in range(1 + len(hidden)))
    made = [data, *[spec._replace(requires_grad=with_gradient) for spec in hidden]]
    return Result(tree, {id(slot): OutputSpec(spec, None) for slot, spec in zip(tree, made, strict=True)})
