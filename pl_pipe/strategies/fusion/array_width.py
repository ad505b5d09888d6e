"""Which variants are trained together, and which one after another. variants -> *arrays*.

One array has one architecture and one batch size, and fits into memory.
"""

from collections.abc import Sequence

import psutil
import torch

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import structure_of
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.settings import AUTO
from pl_pipe.strategies.fusion.variant_building import Variant
from pl_pipe.units import format_bytes

log = get_logger(__name__)

_COPIES = 4
"""Of the parameters: themselves, their gradients, and two states of an optimizer such as Adam's."""
_SHARE = 0.8
"""Of the free memory; the rest is for activations, which `auto` cannot know before the first step."""


def arrays_of(variants: Sequence[Variant], *, max_array: int | str, device: torch.device) -> list[list[Variant]]:
    """Variants in the order of their numbers, in as few arrays as there may be."""
    alike: dict[tuple[str, int | None], list[Variant]] = {}
    for variant in variants:
        key = repr(sorted(structure_of(variant.module).items())), variant.batch_size
        alike.setdefault(key, []).append(variant)
    arrays: list[list[Variant]] = []
    for of_one in alike.values():
        width = widest(of_one[0], device) if max_array == AUTO else int(max_array)
        count = -(-len(of_one) // width)
        even = -(-len(of_one) // count)  # arrays of about one size
        arrays.extend(of_one[start : start + even] for start in range(0, len(of_one), even))
    if len(arrays) > 1:
        log.info(
            "%d variants are trained in %d arrays, one after another: %s",
            len(variants),
            len(arrays),
            "; ".join(", ".join(str(variant.number) for variant in array) for array in arrays),
        )
    return arrays


def widest(variant: Variant, device: torch.device) -> int:
    """How many such variants memory holds, by the size of their parameters."""
    each = _COPIES * sum(parameter.numel() * parameter.element_size() for parameter in variant.module.parameters())
    free = _free_bytes(device)
    if each > free:
        raise FusionError(
            f"one variant takes about {format_bytes(each)} for parameters, gradients and optimizer, and "
            f"{format_bytes(free)} are free on {device}; use a smaller model, or another device"
        )
    return max(1, int(_SHARE * free // each)) if each else 1_000_000


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
