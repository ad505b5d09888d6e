"""cuDNN's choice of algorithms, made by timing. FusionStrategy.setup -> *tuned* -> every convolution of the run.

What was chosen for a convolution is kept by cuDNN's callers for as long as the thread runs, by its shapes alone: a
single step or validation before tuning begins would settle what all later ones run, and cuDNN's untimed guess for
depthwise convolutions launches a kernel for every channel. So tuning begins before the first step of a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

AUTOTUNED = 3
"""Algorithms that are timed for a convolution; all of them would take up to half a minute."""


@contextmanager
def tuned_convolutions(device: torch.device) -> Iterator[None]:
    """Within the block some algorithms are timed for each convolution, unless results must be reproducible."""
    cudnn: Any = torch.backends.cudnn
    if device.type != "cuda" or _must_repeat():
        yield
        return
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = AUTOTUNED > 0, AUTOTUNED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def is_timing_convolutions(device: torch.device) -> bool:
    """Whether convolutions run by what was quickest."""
    cudnn: Any = torch.backends.cudnn
    return device.type == "cuda" and cudnn.enabled and cudnn.benchmark and not _must_repeat()


def _must_repeat() -> bool:
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
