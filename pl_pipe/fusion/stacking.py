"""Who owns the variants' numbers: one stacked tensor for each parameter and buffer; modules see views of it.

    stacked.weight  [M, O, I]      the leaf that autograd knows; its gradient is [M, O, I] too
         │ [j]            │ .grad[j]
    module_j.weight  [O, I]        the Parameter that module_j and its optimizer have had from the start

So an optimizer of module_j writes into the array, and the array's backward writes into what that optimizer reads.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.marks import mark_made
from pl_pipe.tensors.places import put_parameter

Place = tuple[nn.Module, str]


class StackedParameter:
    """One parameter of all variants; `places[j]` is where variant j has it, several where it is tied."""

    def __init__(self, name: str, places: Sequence[Sequence[Place]]) -> None:
        self.name = name
        self.places = [list(of_one) for of_one in places]
        self.own = [_parameter(of_one) for of_one in self.places]
        self.tensor = self._stacked()

    def show(self, *, is_writable: bool = True) -> None:  # noqa: ARG002
        """The first variant's module has the whole array."""
        for module, attribute in self.places[0]:
            put_parameter(module, attribute, self.tensor)

    def hide(self) -> None:
        for module, attribute in self.places[0]:
            put_parameter(module, attribute, self.own[0])

    def refuse_replaced(self) -> None:
        """After a forward: another parameter in this one's place would be the first variant's alone."""
        for module, attribute in self.places[0]:
            if module._parameters.get(attribute) is not self.tensor:
                raise FusionError(
                    f"the forward puts another parameter in the place of {self.name}, which is all variants' at once; "
                    f"write into it ({self.name}.data = …), or let its module run once a variant (fuse_except)"
                )

    def follow(self) -> None:
        """Takes over what happened to the variants' parameters: frozen, moved, replaced, given other memory."""
        requires = False
        base, step = self.tensor.data_ptr(), self.tensor.stride(0) * self.tensor.element_size()
        for variant, of_one in enumerate(self.places):
            parameter = _parameter(of_one)
            requires = requires or parameter.requires_grad
            if parameter is not self.own[variant] or parameter.data_ptr() != base + variant * step:
                self._adopt()
                requires = any(parameter.requires_grad for parameter in self.own)
                break
        if self.tensor.requires_grad != requires:
            self.tensor.requires_grad_(requires)

    def keep(self, variants: Sequence[int]) -> None:
        """Only these variants stay; the others' parameters get memory of their own."""
        for variant, parameter in enumerate(self.own):
            if variant not in variants:
                _own_memory(parameter)
        self.own = [self.own[variant] for variant in variants]
        self.places = [self.places[variant] for variant in variants]
        if self.own:
            self.tensor = self._stacked()

    def _stacked(self) -> nn.Parameter:
        values = _stack([parameter.detach() for parameter in self.own])
        stacked = nn.Parameter(values, requires_grad=False)
        mark(stacked)
        self.tensor = stacked
        self._show_views()
        self._take_gradients()
        if stacked.is_floating_point() or stacked.is_complex():
            stacked.requires_grad_(True)  # or hooks are refused
            stacked.register_hook(self._before_accumulating)  # type: ignore[no-untyped-call]
            stacked.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._hand_out_gradients()
            )
            stacked.requires_grad_(any(parameter.requires_grad for parameter in self.own))
        if stacked.grad is not None:
            self._hand_out_gradients()
        return stacked

    def _adopt(self) -> None:
        self.own = [_parameter(of_one) for of_one in self.places]
        first = self.own[0]
        for variant, parameter in enumerate(self.own):
            if _kind(parameter) != _kind(first):
                raise FusionError(
                    f"{self.name} is {' '.join(map(str, _kind(parameter)))} in variant {variant} and "
                    f"{' '.join(map(str, _kind(first)))} in variant 0; move or change all variants alike"
                )
        if _kind(first) != _kind(self.tensor[0]):
            self.tensor = self._stacked()
            return
        with torch.no_grad():
            for mine, parameter in zip(self.tensor.detach(), self.own, strict=True):
                if mine.data_ptr() != parameter.data_ptr():
                    mine.copy_(parameter.detach())
        self._show_views()

    def _show_views(self) -> None:
        for part, parameter in zip(self.tensor.detach(), self.own, strict=True):
            parameter.data = part

    def _before_accumulating(self, gradient: Tensor) -> Tensor | None:
        """Hooks that users put on a variant's parameter see its own gradient, and may replace it."""
        self._take_gradients()
        changed = None
        for variant, parameter in enumerate(self.own):
            for hook in (parameter._backward_hooks or {}).values():
                changed = gradient.clone() if changed is None else changed
                replaced = hook(changed[variant])
                if replaced is not None:
                    changed[variant] = replaced
        return changed

    def _take_gradients(self) -> None:
        """Before more is added: what the variants' optimizers or users made of the gradients meanwhile."""
        theirs = [parameter.grad for parameter in self.own]
        if all(gradient is None for gradient in theirs):
            self.tensor.grad = None
            return
        if any(gradient is not None and gradient.is_sparse for gradient in theirs):
            self.tensor.grad = _stacked_sparse(theirs)
            return
        if self.tensor.grad is None or self.tensor.grad.is_sparse:
            self.tensor.grad = torch.zeros_like(self.tensor)
        for mine, gradient in zip(self.tensor.grad, theirs, strict=True):
            if gradient is None:
                mine.zero_()
            elif gradient.data_ptr() != mine.data_ptr():
                mine.copy_(gradient)

    def _hand_out_gradients(self) -> None:
        gradient = self.tensor.grad
        assert gradient is not None
        for part, parameter in zip(gradient, self.own, strict=True):
            parameter.grad = part if parameter.requires_grad else None
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)


class StackedBuffer:
    """One buffer of all variants; constants that are the same for all are shown as shared."""

    def __init__(self, name: str, places: Sequence[Sequence[Place]]) -> None:
        self.name = name
        self.places = [list(of_one) for of_one in places]
        self._is_constant = False
        self._checked: list[int] | None = None
        """Versions of the variants' buffers when they were last compared."""
        self._shown: Tensor | None = None
        self._shown_version = 0
        self._stack()

    @property
    def is_constant(self) -> bool:
        """Shown as one that all share."""
        return self._is_constant

    def show(self, *, is_writable: bool = True) -> None:
        """Indices and masks that are alike need not be computed with M times."""
        shown = self.tensor
        if self._is_constant:
            shown = self._one_for_all() if is_writable else self.own[0]
        for module, attribute in self.places[0]:
            module._buffers[attribute] = shown

    def _one_for_all(self) -> Tensor:
        """A copy, to which a forward may write: it then becomes an array."""
        if self._shown is None:
            self._shown = self.own[0].detach().clone()
            self._shown_version = self._shown._version
            mark_made(self._shown)
        return self._shown

    def hide(self) -> None:
        """What the forward left in the buffer's place becomes the variants'."""
        module, attribute = self.places[0][0]
        found = module._buffers.get(attribute)
        for module, attribute in self.places[0]:
            module._buffers[attribute] = self.own[0]
        if found is None or found is self.tensor:
            return
        if found is self._shown and not is_array(found) and found._version == self._shown_version:
            return
        if found is self.own[0]:
            if self._checked is None or found._version == self._checked[0]:
                return
            found = found.clone()
        self._shown = None
        self._adopt(found)

    def follow(self) -> None:
        if self.tensor.layout != torch.strided:
            raise FusionError(f"the buffer {self.name} is sparse, which an array cannot share among its variants")
        base, step = self.tensor.data_ptr(), self.tensor.stride(0) * self.tensor.element_size()
        for variant, of_one in enumerate(self.places):
            buffer = _buffer(of_one)
            if buffer is not self.own[variant] or buffer.data_ptr() != base + variant * step:
                self._stack()
                break
        if self.tensor.is_floating_point() or self.tensor.ndim < 2:
            return  # running statistics and counters change
        versions = [buffer._version for buffer in self.own]
        if versions != self._checked:
            self._is_constant = all(torch.equal(self.tensor[0], other) for other in self.tensor[1:])
            self._checked, self._shown = versions, None

    def keep(self, variants: Sequence[int]) -> None:
        for variant, buffer in enumerate(self.own):
            if variant not in variants:
                buffer.data = buffer.detach().clone()
        self.places = [self.places[variant] for variant in variants]
        if self.places:
            self._stack()

    def put(self, values: Tensor) -> None:
        """All variants' values at once."""
        self._adopt(mark(values))

    def _stack(self) -> None:
        self.own = [_buffer(of_one) for of_one in self.places]
        self.tensor = mark(torch.stack([buffer.detach() for buffer in self.own]))
        self._show_views()

    def _adopt(self, found: Tensor) -> None:
        value = (found if is_array(found) else found.expand(len(self.own), *found.shape)).detach()
        if value.shape == self.tensor.shape and value.dtype == self.tensor.dtype:
            self.tensor.copy_(value)
            self._checked = None
            return
        self.tensor = mark(value.clone(memory_format=torch.contiguous_format))
        self._show_views()

    def _show_views(self) -> None:
        for part, buffer in zip(self.tensor, self.own, strict=True):
            buffer.data = part
        self._checked = self._shown = None
        self._is_constant = False


def stacked_state(variants: Sequence[nn.Module]) -> list[StackedParameter | StackedBuffer]:
    """All parameters and buffers of modules that are alike, each tensor once."""
    parameters: dict[int, tuple[str, list[list[Place]]]] = {}
    buffers: dict[int, tuple[str, list[list[Place]]]] = {}
    named = [list(variant.named_modules()) for variant in variants]
    for of_all in zip(*named, strict=True):
        prefix, first = of_all[0]
        if isinstance(first, torch.jit.ScriptModule):
            continue  # scripted code has its tensors where nobody can put others; such modules run once a variant
        for found, slots in ((parameters, first._parameters), (buffers, first._buffers)):
            for attribute, tensor in slots.items():
                if tensor is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    _, places = found.setdefault(id(tensor), (name, [[] for _ in variants]))
                    for of_one, (_, module) in zip(places, of_all, strict=True):
                        of_one.append((module, attribute))
    return [
        *(StackedParameter(name, places) for name, places in parameters.values()),
        *(StackedBuffer(name, places) for name, places in buffers.values()),
    ]


def new_buffers(
    modules: Sequence[Sequence[nn.Module]],
    stacked: Sequence[StackedParameter | StackedBuffer],
    *,
    apart: Iterable[nn.Module],
) -> list[StackedBuffer]:
    """Of the first variant's modules: buffers that nobody knew, each now with a part in every variant's own. Modules
    that run `apart` have registered theirs themselves.

    Args:
        modules: of each variant, in the same order.
    """
    known = {(id(module), attribute) for one in stacked for module, attribute in one.places[0]}
    by_themselves = {part for module in apart for part in module.modules()}
    found = []
    for of_all in zip(*modules, strict=True):
        first = of_all[0]
        if not first._buffers or first in by_themselves or isinstance(first, torch.jit.ScriptModule):
            continue
        for attribute, tensor in list(first._buffers.items()):
            if tensor is None or (id(first), attribute) in known:
                continue
            parts = tensor.unbind(0) if is_array(tensor) else (tensor,) * len(of_all)
            for module, part in zip(of_all, parts, strict=True):
                is_kept = attribute not in first._non_persistent_buffers_set
                module._buffers.pop(attribute, None)
                module.register_buffer(attribute, part.detach().clone(), persistent=is_kept)
            found.append(StackedBuffer(attribute, [[(module, attribute)] for module in of_all]))
    return found


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Side by side, each laid out as it was: channels may lie last."""
    first = tensors[0]
    strides = {tensor.stride() for tensor in tensors}
    if first.is_contiguous() or len(strides) > 1 or not first.is_contiguous(memory_format=torch.channels_last):
        return torch.stack(list(tensors))
    shape, inner = (len(tensors), *first.shape), (first.numel(), *first.stride())
    return torch.stack(list(tensors), out=torch.empty_strided(shape, inner, dtype=first.dtype, device=first.device))


def _stacked_sparse(gradients: Sequence[Tensor | None]) -> Tensor:
    """Of embeddings in parts that run once a variant; dense where one of them is."""
    like = next(gradient for gradient in gradients if gradient is not None and gradient.is_sparse)
    each = [torch.zeros_like(like) if gradient is None else gradient for gradient in gradients]
    if not all(gradient.is_sparse for gradient in each):
        each = [gradient.to_dense() for gradient in each]
    return torch.stack(each)


def _parameter(places: Sequence[Place]) -> nn.Parameter:
    module, attribute = places[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter


def _buffer(places: Sequence[Place]) -> Tensor:
    module, attribute = places[0]
    buffer = module._buffers[attribute]
    assert buffer is not None
    return buffer


def _kind(tensor: Tensor) -> tuple[list[int], torch.dtype, torch.device]:
    return list(tensor.shape), tensor.dtype, tensor.device


def _own_memory(parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    parameter.data = parameter.detach().clone()
    if gradient is not None:
        parameter.grad = gradient.detach().clone()
