"""Measures a model layer by layer, on the device it will train on. model -> *profile* -> partition.

One recorded pass gives the layers, what they depend on and the memory they keep. Then timed passes, which divide the
step's time among the layers, take turns with plain ones, which measure the step as a whole and so tell how much of it
the layers explain (`Profile.coverage`). Medians stand for the repeats. PipeDream, SOSP'19, section 3.1.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pl_pipe.errors import ProfileError
from pl_pipe.graph import LayerGraph, Profile, Spread
from pl_pipe.log import get_logger
from pl_pipe.profiling.clocks import HostClock
from pl_pipe.profiling.passes import Passes, Signature
from pl_pipe.profiling.place import device_name, place_of, ready_to_run
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.profiling.steps import Step, default_step, is_lightning_module
from pl_pipe.profiling.stopwatches import LayerTimes, stopwatch_for
from pl_pipe.tensors import Recording
from pl_pipe.tensors.trees import tensors_in

Progress = Callable[[int, int], None]
"""Called with the rounds done and the rounds in all."""

_log = get_logger(__name__)


def profile(
    model: nn.Module,
    batch: Any,
    *,
    step: Step | None = None,
    device: torch.device | str | None = None,
    repeats: int = 20,
    warmup: int = 3,
    budget_s: float | None = None,
    autocast_dtype: torch.dtype | None = None,
    progress: Progress | bool | None = None,
) -> Profile:
    """The costs of every layer of one training step, forward and backward.

    Args:
        model: left exactly as it was: weights, gradients, buffers, flags, device, random numbers.
        batch: as the data loader gives it. Without `step`, a LightningModule's `training_step` gets it; another module
            is called with it (a tuple or list as its arguments, a dictionary as its keywords) and the mean of its
            outputs is the loss.
        step: a function of the model and the batch that returns the loss.
        device: where to measure; by default where the model's parameters are.
        repeats: rounds of a timed and a plain pass, of which the medians are taken.
        warmup: rounds before them that do not count.
        budget_s: rounds end early, after one that counts at least, when they have taken so long.
        autocast_dtype: runs the step under autocast.
        progress: called with the rounds done and in all; True draws a bar on stderr.
    """
    if repeats < 1 or warmup < 0:
        raise ProfileError(f"repeats={repeats} warmup={warmup} leave nothing to measure; set repeats of 1 or more")
    name = type(model).__name__
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProfileError(
            f"{name} has no parameter that requires a gradient, so there is no backward pass to measure; "
            f"unfreeze some with requires_grad_()"
        )
    place = place_of(model, device)
    report = _progress(progress)
    with ready_to_run(model, batch, place) as moved:
        passes = Passes(
            model=model,
            batch=moved,
            step=step or default_step(model, moved),
            means_outputs=step is None and not is_lightning_module(model),
            device=place,
            autocast_dtype=autocast_dtype,
            clock=HostClock(place),
            start_state=ModelState(model, weights=False),
            start_random=RandomState(),
        )
        recording, signature = passes.record()
        measured = _measure(passes, signature, repeats=repeats, warmup=warmup, budget_s=budget_s, report=report)
    if recording.unused_parameters:
        _log.info("the step used no %s", ", ".join(recording.unused_parameters))
    graph, spread = _with_times(recording, measured)
    dtype = str(autocast_dtype or next(model.parameters()).dtype).removeprefix("torch.")
    return Profile(
        graph=graph,
        model=name,
        device=device_name(place),
        dtype=f"{dtype} autocast" if autocast_dtype is not None else dtype,
        batch=tuple(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_in(batch)),
        torch_version=torch.__version__,
        repeats=len(measured.step_s),
        step_s=float(np.median(measured.step_s)),
        data_load_s=None,
        spread=spread,
        unused_parameters=recording.unused_parameters,
    )


@dataclass(frozen=True)
class _Measured:
    """One entry a round."""

    layers: list[LayerTimes] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


def _measure(
    passes: Passes, signature: Signature, *, repeats: int, warmup: int, budget_s: float | None, report: Progress
) -> _Measured:
    measured, start_s = _Measured(), time.monotonic()
    rounds = warmup + repeats
    stopwatch = stopwatch_for(passes, signature)
    for number in range(rounds):
        report(number, rounds)
        layers, step_s = stopwatch.time_layers(), passes.plain()
        if number >= warmup:
            measured.layers.append(layers)
            measured.step_s.append(step_s)
            if budget_s is not None and time.monotonic() - start_s > budget_s:
                break
    report(rounds, rounds)
    return measured


def _with_times(recording: Recording, measured: _Measured) -> tuple[LayerGraph, dict[str, Spread]]:
    position = {name: index for index, name in enumerate(recording.layer_names)}
    forward_s = np.percentile([layers.forward_s for layers in measured.layers], [25, 50, 75], axis=0)
    backward_s = np.percentile([layers.backward_s for layers in measured.layers], [25, 50, 75], axis=0)
    nodes, spread = [], {}
    for node in recording.graph.nodes:
        forward = backward = [0.0, 0.0, 0.0]  # shared parameters take no time
        if node.name in position:
            forward, backward = (times_s[:, position[node.name]].tolist() for times_s in (forward_s, backward_s))
        nodes.append(replace(node, forward_s=forward[1], backward_s=backward[1]))
        spread[node.name] = Spread(forward_s=(forward[0], forward[2]), backward_s=(backward[0], backward[2]))
    return replace(recording.graph, nodes=tuple(nodes)), spread


def _progress(progress: Progress | bool | None) -> Progress:
    if progress is True:
        return _draw_bar
    return progress if callable(progress) else _draw_nothing


def _draw_nothing(_done: int, _total: int) -> None: ...


def _draw_bar(done: int, total: int) -> None:
    filled = 30 * done // total
    sys.stderr.write(f"\rprofiling [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}" + "\n" * (done == total))
    sys.stderr.flush()
