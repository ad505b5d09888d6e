"""One measurement in a process of its own: a workload, a way to train it, a number of variants. -> a line of JSON.

    python benchmarks/fusion/cell.py --workload bert --mode auto --variants 8 --precision bf16

`--mode` is a peer (peers.py) or a formulation of FusionStrategy, through `trainer.fit`. With `--gate DIR` it says there
when it is ready, and times when it is told to: several may prepare at once, and one at a time is timed.
"""

import argparse
import contextlib
import cProfile
import json
import logging
import os
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels import write_kernels
from usage import Usage
from workloads import WORKLOADS, Resident, Trained

PEERS = ("serial eager", "serial compiled", "vmap", "branches of plain models")
_BLOCKS = 5
_STEPS = 4000
"""More than are run: timing stops the training."""


class Gate:
    """Files in a folder, through which the driver lets one process at a time be timed."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._folder = None if folder is None else Path(folder)
        self._name = name

    def wait(self) -> None:
        if self._folder is not None:
            (self._folder / f"ready_{self._name}").touch()
            while not (self._folder / f"go_{self._name}").exists():
                time.sleep(0.01)


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
    found = []
    for _ in range(_BLOCKS):
        began = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        found.append((time.perf_counter() - began) / count)
    return found


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def through_fit(options: argparse.Namespace, device: str, gate: Gate) -> dict[str, Any]:
    """FusionStrategy, from the unchanged LightningModule."""
    import lightning as L

    from pl_pipe.strategies import FusionStrategy
    from pl_pipe.strategies.fusion import tuning

    tuning.AUTOTUNED = options.autotuned
    found: dict[str, Any] = {}
    small = options.small

    class Clock(L.Callback):
        """Lets the training settle, then times blocks of steps."""

        def __init__(self) -> None:
            self.began, self.count, self.seconds = 0.0, 0, list[float]()
            self.block = 0
            self.usage: Usage | None = None
            self.profile = cProfile.Profile()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            training = trainer.strategy.training
            if self.block == 0:
                trial = training._trials.get("training_step")
                if trial is None or not trial.is_decided or batch_idx < _settled(trial):
                    return
                synchronize()
                gate.wait()
                self.block = -1
                self.count, self.began = 0, time.perf_counter()
                return
            self.count += 1
            if self.block == -1:  # how many make a block
                if self.count == 10:
                    synchronize()
                    self.block = max(2, int(options.block_s / ((time.perf_counter() - self.began) / 10)))
                    self.usage = Usage()
                    if options.profile:
                        self.profile.enable()
                    self.count, self.began = 0, time.perf_counter()
                return
            if self.count == self.block:
                synchronize()
                self.seconds.append((time.perf_counter() - self.began) / self.count)
                self.count, self.began = 0, time.perf_counter()
                if len(self.seconds) == _BLOCKS:
                    assert self.usage is not None
                    self.profile.disable()
                    if options.profile:
                        pstats.Stats(self.profile).sort_stats("tottime").print_stats(45)
                    found.update(self.usage.stop())
                    step = replayed(training)
                    if step is not None:
                        found["alone_s"] = statistics.median(timed(step, options.block_s / 2))
                        if options.kernels:
                            write_kernels(step, options.kernels)
                    trainer.should_stop = True
                    trainer.limit_train_batches = 0

    clock = Clock()
    rates = [1e-3 * (1 + 0.1 * place) for place in range(options.variants)]
    compiles = {"auto": True, "auto uncompiled": False}.get(options.mode, "auto")
    fusion = FusionStrategy(
        {"lr": rates}, formulation="auto" if options.mode.startswith("auto") else options.mode, compile=compiles,
        fuse_except=options.fuse_except,
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1, logger=False, strategy=fusion,
        precision="bf16-mixed" if options.precision == "bf16" else "32-true", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock], log_every_n_steps=50,
    )  # fmt: skip
    L.seed_everything(1, verbose=False)
    with contextlib.suppress(StopIteration):
        trainer.fit(Trained(options.workload, small=small), Resident(options.workload, device, _STEPS, small=small))
    facts = fusion.fusion_facts
    assert facts is not None
    found["seconds"] = clock.seconds
    found["chosen"] = facts.chosen.get("training_step", "")
    found["tried"] = {name: round(1e3 * value, 3) for name, value in facts.step_s.get("training_step", {}).items()}
    return found


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

    torch.backends.cudnn.benchmark = options.autotuned > 0
    torch.backends.cudnn.benchmark_limit = options.autotuned
    mode = options.mode.replace(" of plain models", "")
    step, models = peer(options.workload, mode, options.variants, options.precision, device, small=options.small)
    for _ in range(3):
        step()
    synchronize()
    gate.wait()
    usage = Usage()
    seconds = timed(step, options.block_s)
    if options.kernels:
        write_kernels(step, options.kernels)
    return {"seconds": seconds, "models": models, **usage.stop()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    parser.add_argument("--gate")
    parser.add_argument("--name", default="cell")
    parser.add_argument("--block-s", type=float, default=0.25)
    parser.add_argument("--fuse-except", nargs="*", default=[])
    parser.add_argument("--autotuned", type=int, default=3, help="algorithms that cuDNN times for a convolution")
    parser.add_argument("--kernels", type=Path, help="a CSV file for the GPU's kernels of a step")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to see that all works")
    options = parser.parse_args()
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
        run = against if options.mode in PEERS else through_fit
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
