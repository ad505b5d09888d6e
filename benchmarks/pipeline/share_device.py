"""Several ranks of a pipeline on one GPU: the same losses as one process, and as a pipeline on the CPU.

    python benchmarks/pipeline/share_device.py            # one CUDA device; pl_pipe installed or on PYTHONPATH

A small network over 2 and 4 ranks on cuda:0 with `share_device=true`, whose messages go through pinned memory of the
host by gloo. `1f1b` is compared with a plain run on the same GPU, `pipedream` with the same pipeline on the CPU.
`recompute` and `wire_dtype=bf16` are run on the GPU as well: the first must change nothing. With
`precision=bf16-mixed`, `1f1b` is compared with a plain run of the same precision, and `pipedream` with itself: run
twice, it must be the same to the bit, which a message that is read before it is there would not be.

Goals: the largest difference of a loss at most 1e-5 for `1f1b`, 1e-4 for `pipedream`; bf16-mixed 1e-2 and 0.
"""

import argparse
import logging
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
from ranks import busy, prepare, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

LAYERS, WIDTH, CLASSES, SAMPLES, BATCH = 8, 256, 10, 512, 64
LIMITS = {"1f1b": 1e-5, "pipedream": 1e-4}
MIXED = "bf16-mixed"
MIXED_LIMITS = {"1f1b": 1e-2, "pipedream": 0.0}


class Network(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def losses(stages: int, schedule: str | None, on_gpu: bool, options: dict[str, Any]) -> list[float]:
    """One rank's; those of rank 0 are the losses."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    options = dict(options)
    where: dict[str, Any] = {
        "accelerator": "cuda" if on_gpu else "cpu",
        "strategy": "auto",
        "precision": options.pop("precision", None),
    }
    if schedule is not None:
        ends = [f"layers.{LAYERS * (stage + 1) // stages - 1}" for stage in range(stages - 1)]
        settings: dict[str, Any] = {"schedule": schedule, "split_points": ends, "timeout_s": 60, **options}
        where["strategy"] = PipeDreamStrategy(share_device=on_gpu, **settings)
        if on_gpu:
            del where["accelerator"]  # the strategy brings it
    model = Network()
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,)))
    trainer = L.Trainer(
        devices=stages,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **where,
    )
    trainer.fit(model, DataLoader(data, BATCH))
    if on_gpu and schedule is not None:
        assert trainer.strategy.root_device == torch.device("cuda", 0)
    return model.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=(2, 4))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: this script is about ranks that share one")
    prepare()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; {busy()}\n")
    print("| ranks | schedule | options | largest difference | of | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    plain = run_ranks(losses, 1, 1, None, True, {})[0]
    mixed = run_ranks(losses, 1, 1, None, True, {"precision": MIXED})[0]
    missed = []
    for ranks in arguments.ranks:
        for schedule, limit in LIMITS.items():
            one = schedule == "1f1b"
            on_cpu = plain if one else run_ranks(losses, ranks, ranks, schedule, False, {})[0]
            for options in ({}, {"recompute": True}, {"wire_dtype": "bf16"}, {"precision": MIXED}):
                expected, against = on_cpu, "one process, cuda" if one else "the pipeline, cpu"
                if "precision" in options:
                    expected = mixed if one else run_ranks(losses, ranks, ranks, schedule, True, options)[0]
                    against = "one process, cuda" if one else "the same again"
                    limit = MIXED_LIMITS[schedule]
                began = time.monotonic()
                found = run_ranks(losses, ranks, ranks, schedule, True, options)[0]
                seconds = time.monotonic() - began
                worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
                shown = ", ".join(f"{name}={value}" for name, value in options.items()) or "-"
                print(f"| {ranks} | {schedule} | {shown} | {worst:.1e} | {against} | {seconds:.1f} |", flush=True)
                if "wire_dtype" not in options and worst > limit:
                    missed.append(f"{ranks} ranks, {schedule}, {shown}: {worst:.1e} is above {limit:g}")
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
