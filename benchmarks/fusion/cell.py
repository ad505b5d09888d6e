"""One measurement in a process of its own: a workload, a way to train it, a number of variants. -> a line of JSON.

    python benchmarks/fusion/cell.py --workload bert --mode auto --variants 8 --precision bf16

`--mode` is a peer (peers.py) or, through `trainer.fit`, a formulation of FusionStrategy or `plain lightning`. With
`--gate DIR` it says there when it is ready, and times when it is told to.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from clock import BLOCKS, Clock, Gate, Moment, counted_steps, synchronize
from kernels import write_kernels
from modes import AUTO, AUTO_TUNED, AUTO_UNCOMPILED, IN_ONE_PROCESS, PLAIN_LIGHTNING
from usage import Usage
from workloads import WORKLOADS, Resident, Trained

_STEPS = 100_000
"""More than are run: timing stops the training."""
_PLAIN_SETTLED = 12
"""Steps before a plain training is timed; in the first of them cuDNN times algorithms."""


def timed(step: Callable[[], None], block_s: float) -> list[float]:
    """Seconds a step, in several blocks."""
    for _ in range(3):
        step()
    synchronize()
    began = time.perf_counter()
    for _ in range(3):
        step()
    synchronize()
    count = max(2, int(block_s / ((time.perf_counter() - began) / 3)))
    moments = [Moment()]
    for _ in range(BLOCKS):
        for _ in range(count):
            step()
        moments.append(Moment())
    return [later.since(earlier) / count for earlier, later in pairwise(moments)]


def through_fit(options: argparse.Namespace, device: str, gate: Gate) -> dict[str, Any]:
    """FusionStrategy, from the unchanged LightningModule. All variants are one array, or the cell fails."""
    from pl_pipe.strategies import FusionStrategy
    from pl_pipe.strategies.fusion import tuning

    tuning.AUTOTUNED = options.autotuned
    found: dict[str, Any] = {}

    def is_settled(trainer: Any, batch_idx: int) -> bool:
        trial = trainer.strategy.training._trials.get("training_step")
        if trial is None or not trial.is_decided or batch_idx < _settled(trial):
            return False
        check_width(len(trainer.strategy.training.active), options.variants)
        return True

    def replay_alone(trainer: Any) -> None:
        step = replayed(trainer.strategy.training)
        if step is not None:
            found["alone_s"] = statistics.median(timed(step, options.block_s / 2))
            if options.kernels:
                write_kernels(step, options.kernels)

    clock = Clock(
        is_settled=is_settled, ready=gate.wait, block_s=options.block_s, then=replay_alone, profiles=options.profile,
        kernels=options.kernels_through_fit,
    )  # fmt: skip
    rates = [1e-3 * (1 + 0.1 * place) for place in range(options.variants)]
    compiles = {AUTO: True, AUTO_TUNED: "tuned", AUTO_UNCOMPILED: False}.get(options.mode)
    fusion = FusionStrategy(
        {"lr": rates}, formulation=options.mode if compiles is None else AUTO,
        compile="auto" if compiles is None else compiles,
        fuse_except=options.fuse_except, max_array=options.variants, layers=options.layers,
    )  # fmt: skip
    fit(options, device, fusion, clock)
    facts = fusion.fusion_facts
    assert facts is not None
    found["chosen"] = facts.chosen.get("training_step", "")
    found["tried"] = {name: round(1e3 * value, 3) for name, value in facts.step_s.get("training_step", {}).items()}
    return {"seconds": clock.seconds, **clock.usage, **found}


def check_width(active: int, variants: int) -> None:
    """Samples are counted for all variants: those of a second array would be counted and not trained."""
    if active != variants:
        raise RuntimeError(f"an array of {active} is trained, {variants} variants were asked for")


def plainly(options: argparse.Namespace, device: str, gate: Gate) -> dict[str, Any]:
    """The same LightningModule by Lightning itself: what an array of one is compared with."""
    tune_convolutions(options.autotuned)
    clock = Clock(
        is_settled=lambda _, batch_idx: batch_idx >= _PLAIN_SETTLED, ready=gate.wait, block_s=options.block_s,
        profiles=options.profile,
    )  # fmt: skip
    fit(options, device, "auto", clock)
    return {"seconds": clock.seconds, "models": 1, **clock.usage}


def fit(options: argparse.Namespace, device: str, strategy: Any, clock: Clock) -> None:
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1, logger=False, strategy=strategy,
        precision="bf16-mixed" if options.precision == "bf16" else "32-true", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock], log_every_n_steps=50,
    )  # fmt: skip
    L.seed_everything(1, verbose=False)
    model = Trained(options.workload, small=options.small)
    batches = Resident(options.workload, device, _STEPS, small=options.small)
    with contextlib.suppress(StopIteration):
        trainer.fit(model, batches)


def _settled(trial: Any) -> int:
    return 8 + sum(len(times) for times in trial._times.values())


def replayed(training: Any) -> Callable[[], None] | None:
    """A step without Lightning and without Python, for the part that is captured."""
    chosen = training._trials["training_step"].chosen
    whole, capture = getattr(chosen, "_whole", None), getattr(chosen, "_capture", None)
    optimizers = training.composite.replayed
    if whole is not None:
        return whole.replay  # type: ignore[no-any-return]
    if capture is None or optimizers is None or optimizers._capture is None:
        return None

    def step() -> None:
        capture.replay()
        optimizers._capture.replay()

    return step


def against(options: argparse.Namespace, device: str, gate: Gate) -> dict[str, Any]:
    from peers import peer

    tune_convolutions(options.autotuned)
    mode = options.mode.replace(" of plain models", "")
    step, models = peer(options.workload, mode, options.variants, options.precision, device, small=options.small)
    for _ in range(3):
        step()
    synchronize()
    together = gate.wait()
    usage = Usage()
    if together is None:
        seconds = timed(step, options.block_s)
    else:
        window_s = BLOCKS * options.block_s
        seconds = [window_s / counted_steps(step, together, window_s, now=time.monotonic)]
    used = usage.stop()
    if options.kernels:
        write_kernels(step, options.kernels)
    return {"seconds": seconds, "models": models, **used}


def tune_convolutions(algorithms: int) -> None:
    """As FusionStrategy does."""
    torch.backends.cudnn.benchmark = algorithms > 0
    torch.backends.cudnn.benchmark_limit = algorithms


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    parser.add_argument("--gate")
    parser.add_argument("--name", default="cell")
    parser.add_argument("--block-s", type=float, default=1.0, help="of timing, several times without a pause")
    parser.add_argument("--fuse-except", nargs="*", default=[])
    parser.add_argument("--layers", default="auto", help="of an array: timed, usual or auto")
    parser.add_argument("--autotuned", type=int, default=3, help="algorithms that cuDNN times for a convolution")
    parser.add_argument("--kernels", type=Path, help="a CSV file for the GPU's kernels of a step")
    parser.add_argument("--kernels-through-fit", type=Path, help="the same for a step through trainer.fit")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to see that all works")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    row: dict[str, Any] = {
        "workload": options.workload, "mode": options.mode, "variants": options.variants,
        "precision": options.precision,
    }  # fmt: skip
    try:
        run = against if options.mode in IN_ONE_PROCESS else plainly if options.mode == PLAIN_LIGHTNING else through_fit
        found = run(options, device, Gate(options.gate, options.name))
        seconds = statistics.median(found.pop("seconds"))
        models = found.pop("models", options.variants)
        samples = (4 if options.small else WORKLOADS[options.workload].batch) * models
        row.update(found, step_ms=round(1e3 * seconds, 4), samples_s=round(samples / seconds, 1))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        if os.environ.get("VERBOSE"):
            raise
    row["took_s"] = round(time.perf_counter() - began, 1)
    sys.stdout.write("\n" + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
