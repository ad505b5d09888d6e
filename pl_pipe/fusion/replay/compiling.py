"""Kernels made for a step's operations by torch's compiler. traced graph -> *compiled* -> a function.

The backward is among the operations already, so that there is nothing for autograd to do. Forward and backward are
compiled apart, as in any compiled training, where the graph has such halves.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pl_pipe.fusion.replay.drawing import hold_draws
from pl_pipe.fusion.replay.halves import compiled_halves

Run = Callable[..., Sequence[Tensor]]
_SETTINGS = {"fallback_random": True}
_TUNED = {"coordinate_descent_tuning": True}
"""How a kernel goes through its numbers is tried out, one way after the other, for as long as it gets quicker."""


def compiled(graph: fx.GraphModule, arguments: Sequence[Tensor], *, trains: bool = True, tunes: bool = False) -> Run:
    """For tensors of the arguments' shapes; of a training, the last is what gradients are multiples of.

    Random numbers are drawn as torch's own operations draw them. To tune kernels for a GPU takes longer.
    """
    from torch._functorch import config as autograd_config
    from torch._inductor import config  # takes a second, which only who compiles should wait for
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def for_training(graph: Any, example: Any, **options: Any) -> Any:
        """A graph without autograd is taken for inference, and for that operations are put right before whoever uses
        them: here all gradients of weights would come last, after what they are made of had long left the cache.
        Convolutions' layouts are chosen otherwise too, without a thought of the backward."""
        run = compiled_halves(copy.deepcopy(graph), partial(compile_fx_inner, **_without_places(options)))
        return run or compile_fx_inner(graph, example, **{**options, "is_inference": False})

    graph = copy.deepcopy(graph)
    hold_draws(graph)
    settings = {**_SETTINGS, **(_TUNED if tunes else {})}
    with torch.no_grad(), config.patch(settings), autograd_config.patch(enable_autograd_cache=False):
        example = [tensor.detach() for tensor in arguments]
        run: Any = compile_fx(graph, example, inner_compile=for_training if trains else compile_fx_inner)

    def without_gradients(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            out: Sequence[Tensor] = run(*(tensor.detach() for tensor in tensors))
            return out

    return without_gradients


def _without_places(options: dict[str, Any]) -> dict[str, Any]:
    """What is said of the whole graph's arguments is not true of its halves'."""
    return {name: value for name, value in options.items() if name not in ("static_input_idxs", "is_inference")}
