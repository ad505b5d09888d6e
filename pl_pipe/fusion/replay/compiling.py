"""Kernels made for a step's operations by torch's compiler. traced graph -> *compiled* -> a function.

The backward is among the operations already, so there is one graph, and nothing for autograd to do.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pl_pipe.fusion.replay.tracing import Traced

Run = Callable[..., Sequence[Tensor]]
_SETTINGS = {
    "fallback_random": True,
    "reorder_for_locality": False,
}
"""A graph without autograd is taken for one of inference, where operations are put right before whoever uses them: here
all gradients of weights would come last, after what they are made of had long left the cache."""


def compiled(traced: Traced, arguments: Sequence[Tensor]) -> Run:
    """For tensors of the arguments' shapes. Random numbers are drawn as torch's own operations draw them."""
    from torch._inductor import config  # takes a second, which only who compiles should wait for
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), config.patch(_SETTINGS):
        run: Any = compile_fx(copy.deepcopy(traced.graph), [tensor.detach() for tensor in arguments])

    def without_gradients(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            out: Sequence[Tensor] = run(*(tensor.detach() for tensor in tensors))
            return out

    return without_gradients
