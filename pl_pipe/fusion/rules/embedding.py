"""Embeddings of M variants: their tables stand below each other, and every variant's indices begin at its own.

Legend: M variants, V rows of a table, D features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.fusion.context import Context
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array
from pl_pipe.tensors.arrays.messages import place, remedy

OFFSET = "offset indices"


def _embedding(
    context: Context,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        layer = context.report.part
        raise FusionError(
            f"{place(layer)}: an embedding with sparse=True gives sparse gradients, and those of several variants "
            f"in one tensor are dense; set sparse=False, or {remedy(layer)}"
        )
    if not is_array(weight):
        return NotImplemented
    width, rows, _ = weight.shape
    indices = as_array(input, width)
    if max_norm is not None:
        with torch.no_grad():
            for variant in range(width):
                torch.embedding_renorm_(weight.detach()[variant], indices[variant].contiguous(), max_norm, norm_type)
    first_M = torch.arange(width, device=input.device, dtype=input.dtype) * rows
    moved = indices + first_M.view(width, *(1,) * (indices.ndim - 1))
    context.report.note("embedding", OFFSET)
    out = F.embedding(moved, weight.flatten(0, 1), scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None and out.requires_grad:
        padding = padding_idx if padding_idx >= 0 else rows + padding_idx
        out = torch.where(
            (indices == padding).unsqueeze(-1), out.detach(), out
        )  # as a table without that row's gradient
    return mark(out)


RULES: dict[Any, Callable[..., Any]] = {F.embedding: _embedding}
