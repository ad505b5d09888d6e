"""Attention of M variants: samples of all variants are one batch of M·N.

`multi_head_attention_forward` is torch's own Python; it runs as it is, and its operations are seen one by one.
Legend: M variants, N samples, H heads, L/S positions of queries and keys, E features.
"""

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import BRANCHES
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.elementwise import widened
from pl_pipe.tensors.arrays.layout import as_array

FOLDED = "one batch"
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function of torch that does not hand itself over as a whole: the mode sees what it calls."""
    assert isinstance(function, types.FunctionType)
    names = {**function.__globals__, **dict.fromkeys(_CHECKS, _no)}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False


_open_multi_head_attention = opened(F.multi_head_attention_forward)


def _multi_head_attention(context: Context, *args: Any, **kwargs: Any) -> Any:
    with context.seen_by_operation():
        return _open_multi_head_attention(*args, **kwargs)


def _scaled_dot_product(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    settings: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:
        settings["enable_gqa"] = True
    if dropout_p > 0 and context.streams.own:
        context.report.note("scaled_dot_product_attention", BRANCHES, "each variant draws its own mask")
        return context.per_variant(
            F.scaled_dot_product_attention,
            (query, key, value, attn_mask),
            settings,
            name="scaled_dot_product_attention",
        )
    parts = [as_array(tensor, context.width) for tensor in (query, key, value)]
    if len({part.ndim for part in parts}) > 1:
        return NotImplemented
    leading = parts[0].shape[:-3]
    if any(part.shape[:-3] != leading for part in parts):
        return NotImplemented
    mask = None if attn_mask is None else _folded_mask(attn_mask, parts[0], context.width)
    context.report.note("scaled_dot_product_attention", FOLDED)
    q, k, v = (_folded(part) for part in parts)
    out = F.scaled_dot_product_attention(q, k, v, mask, **settings)
    return mark(out.view(*parts[0].shape[:-1], parts[2].shape[-1]) if parts[0].ndim > 4 else out)


def _folded(tensor: Tensor) -> Tensor:
    """[M, N, H, L, E] as [M·N, H, L, E]: kernels know four dimensions."""
    return tensor.flatten(0, tensor.ndim - 4) if tensor.ndim > 4 else tensor


def _folded_mask(mask: Tensor, query: Tensor, width: int) -> Tensor:
    """A mask that broadcasts against folded queries."""
    seen = query.ndim - 1
    if not is_array(mask) and (mask.ndim < seen or query.ndim <= 4 or all(size == 1 for size in mask.shape[:-3])):
        return mask
    full: Tensor = widened(as_array(mask, width), seen)
    if query.ndim <= 4:
        return full
    lead = query.shape[1:-3]
    return full.expand(width, *lead, *full.shape[1 + len(lead) :]).flatten(0, len(lead))


RULES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _multi_head_attention,
    F.scaled_dot_product_attention: _scaled_dot_product,
}
