"""What a host of `hosts.py` runs: a server that forks a rank for each order, and the trainings themselves."""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from pl_pipe.recipes.recorded.datamodule import RecordedData
from pl_pipe.recipes.recorded.module import RecordedModel
from pl_pipe.strategies import PipeDreamStrategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Clock(L.Callback):
    """When batches ended, and what the process had computed by then."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.computed_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.perf_counter())
        self.computed_s.append(time.process_time())


def rehearsed(
    *,
    profile: str,
    dilation: float,
    batch_size: int,
    batches: int,
    plan: str | None,
    schedule: str = "pipedream",
    num_microbatches: int | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """A recorded model: by a plan's file, or without one by Lightning's DDP."""
    strategy: Any = "ddp"
    if plan is not None:
        strategy = PipeDreamStrategy(
            plan=plan, schedule=schedule, num_microbatches=num_microbatches, timeout_s=timeout_s
        )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=1,
        callbacks=[clock], **QUIET,
    )  # fmt: skip
    model = RecordedModel(profile, dilation, batch_size)
    trainer.fit(model, datamodule=RecordedData(batch_size=batch_size, batches=batches))
    return {"ends_s": clock.ends_s, "computed_s": clock.computed_s}


WORK = {"rehearsed": rehearsed}


def main(orders: Sequence[str] | Any = sys.stdin) -> None:
    """Forks for each order; the child answers on the standard output, which nothing else may use."""
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(order["port"])
            os.write(answers, (json.dumps(_answer(order)) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # it said nothing
            os.write(answers, (json.dumps({"error": f"it ended with status {status}"}) + "\n").encode())


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        return {"answer": WORK[order["work"]](**order["options"])}
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
