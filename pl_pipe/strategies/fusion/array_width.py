"""Which variants are trained together, and which one after another. variants -> *arrays*.

One array has one architecture and one batch size, and fits into memory: its weights and gradients before anything is
begun, all that its steps take when the first batch is there (divided_variants.py).
"""

import logging
from collections.abc import Sequence
from typing import TypeVar

import psutil
import torch

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import structure_of
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.settings import AUTO
from pl_pipe.strategies.fusion.variant_building import Variant
from pl_pipe.strategies.fusion.variant_memory import VariantMemory, bytes_of
from pl_pipe.units import format_bytes

log = get_logger(__name__)
T = TypeVar("T")

_SHARE = 0.8
"""Of the free memory; the rest is for what is made in passing, and for memory that lies in pieces."""


def arrays_of(
    variants: Sequence[Variant], *, max_array: int | str, device: torch.device, room: int | None = None
) -> list[list[Variant]]:
    """Variants in the order of their numbers, in as few arrays as there may be. `room` is how many bytes an array may
    take for weights and gradients; by default what is free."""
    alike: dict[tuple[str, int | None], list[Variant]] = {}
    for variant in variants:
        key = repr(sorted(structure_of(variant.module).items())), variant.batch_size
        alike.setdefault(key, []).append(variant)
    arrays: list[list[Variant]] = []
    for of_one in alike.values():
        width = widest_before_training(of_one[0], device, room) if max_array == AUTO else int(max_array)
        arrays.extend(evenly(of_one, width))
    if len(arrays) > 1:
        differ = len(alike) > 1
        log.log(
            logging.WARNING if differ else logging.INFO,
            "%d variants are trained in %d arrays, one after another: %s%s",
            len(variants),
            len(arrays),
            numbers_in(arrays),
            " (their architectures or batch sizes differ)" if differ else "",
        )
    return arrays


def numbers_in(arrays: Sequence[Sequence[Variant]]) -> str:
    return "; ".join(", ".join(str(variant.number) for variant in array) for array in arrays)


def evenly(items: Sequence[T], width: int) -> list[list[T]]:
    """In as few parts as may be, of about one size, none longer than `width`."""
    count = -(-len(items) // width)
    each = -(-len(items) // count)
    return [list(items[start : start + each]) for start in range(0, len(items), each)]


def widest_before_training(variant: Variant, device: torch.device, room: int | None = None) -> int:
    """How many such variants memory holds at most, by weights and gradients, which every training has."""
    weights = bytes_of((*variant.module.parameters(), *variant.module.buffers()))
    each = weights + bytes_of(one for one in variant.module.parameters() if one.requires_grad)
    free = free_bytes(device) if room is None else room
    if each > free:
        raise FusionError(
            f"one variant takes about {format_bytes(each)} for weights and gradients, and {format_bytes(free)} are "
            f"free on {device}; use a smaller model, or another device"
        )
    return max(1, int(_SHARE * free // each)) if each else 1_000_000


def widest(memory: VariantMemory, *, free: int, one_by_one: bool = False) -> int:
    """How many such variants `free` bytes hold, perhaps none. One by one, steps have one place for activations."""
    left = _SHARE * free - (memory.activations_bytes if one_by_one else 0)
    each = memory.kept_bytes if one_by_one else memory.total_bytes
    return max(0, int(left // each)) if each else 1_000_000


def whole_bytes(device: torch.device, ranks: int) -> int:
    """What each of a host's ranks has if nobody else takes any: alike on all of them, whenever they look."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total) // ranks


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return int(psutil.virtual_memory().available)
