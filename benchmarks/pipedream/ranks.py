"""What a host of `hosts.py` runs: a server that forks a rank for each order, and the trainings themselves."""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from recurrent import Recurrent, Sequences
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pl_pipe.callbacks import PipelineTimeline
from pl_pipe.partition import read_plan
from pl_pipe.recipes.recorded.datamodule import RecordedData
from pl_pipe.recipes.recorded.module import RecordedModel
from pl_pipe.recipes.vision.classifier import ImageClassifier
from pl_pipe.recipes.vision.digits import DigitsData
from pl_pipe.strategies import PipeDreamStrategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Clock(L.Callback):
    """When batches ended, and what the process had computed by then; tells the host when training begins and ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.computed_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.perf_counter())
        self.computed_s.append(time.process_time())

    def on_train_start(self, *_: Any) -> None:
        tell({"trains": True})

    def on_train_end(self, *_: Any) -> None:
        tell({"trains": False})


def tell(answer: dict[str, Any]) -> None:
    """The host's server, which knows nothing else of what happens here."""
    os.write(_answers, (json.dumps(answer) + "\n").encode())


_answers = 1


def rehearsed(
    *,
    profile: str,
    dilation: float,
    batch_size: int,
    batches: int,
    plan: str | None,
    schedule: str = "pipedream",
    num_microbatches: int | None = None,
    timeline: str | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """A recorded model: by a plan's file, or without one by Lightning's DDP; a timeline goes to the folder given."""
    strategy: Any = "ddp"
    if plan is not None:
        strategy = PipeDreamStrategy(
            plan=plan, schedule=schedule, num_microbatches=num_microbatches, timeout_s=timeout_s
        )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=1,
        callbacks=[clock, *([] if timeline is None else [PipelineTimeline(timeline, batches=batches)])], **QUIET,
    )  # fmt: skip
    model = RecordedModel(profile, dilation, batch_size)
    trainer.fit(model, datamodule=RecordedData(batch_size=batch_size, batches=batches))
    return {"ends_s": clock.ends_s, "computed_s": clock.computed_s}


class Progress(L.Callback):
    """Samples a second of each epoch, and when which accuracy was reached; time 0 is the first batch's."""

    def __init__(self) -> None:
        self.samples_per_s: list[float] = []
        self.accuracies: list[tuple[float, float]] = []
        self._start_s: float | None = None

    def on_train_epoch_start(self, *_: Any) -> None:
        self._epoch_s = time.perf_counter()
        self._start_s = self._start_s or self._epoch_s

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert trainer.train_dataloader is not None
        seconds = time.perf_counter() - self._epoch_s - self._validated_s
        self.samples_per_s.append(len(trainer.train_dataloader.dataset) / seconds)

    def on_validation_start(self, *_: Any) -> None:
        self._validation_s = time.perf_counter()

    _validated_s = 0.0

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert self._start_s is not None
        now_s = time.perf_counter()
        self._validated_s = now_s - self._validation_s
        self.accuracies.append((now_s - self._start_s, float(trainer.callback_metrics["val_acc"])))


def _digits(batch_size: int) -> tuple[L.LightningModule, L.LightningDataModule]:
    model = ImageClassifier(
        "vgg16", num_classes=10, image_size=32, width=0.25, dropout=0.1, optimizer="adam", lr=5e-4, weight_decay=0.0,
        lr_policy="polynomial", warmup_epochs=1,
    )  # fmt: skip
    return model, DigitsData(batch_size=batch_size)


REAL: dict[str, Callable[[int], tuple[L.LightningModule, L.LightningDataModule]]] = {
    "vgg16": _digits,
    "lstm": lambda batch_size: (Recurrent(), Sequences(batch_size)),
}
"""Models that really compute, and their data in batches of the size given."""


def trained(*, model: str, plan: str | None, epochs: int, batch_size: int, seed: int) -> dict[str, Any]:
    """One of `REAL`, by a plan's file, or without one by Lightning's DDP."""
    L.seed_everything(seed, verbose=False)
    progress = Progress()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy="ddp" if plan is None else PipeDreamStrategy(plan=plan), max_epochs=epochs, callbacks=[progress],
        num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    module, data = REAL[model](batch_size)
    trainer.fit(module, datamodule=data)
    return {"samples_per_s": progress.samples_per_s, "accuracies": progress.accuracies}


class Part(nn.Module):
    """The layers of one stage, for torch's pipeline: a row of the batch in, a row out."""

    def __init__(self, model: RecordedModel, nodes: Sequence[str]) -> None:
        super().__init__()
        record = model._record
        self.names = {node: name for node, name in record.names.items() if node in nodes}
        self.inputs_of = {node: record.inputs_of(node) for node in self.names}
        self.layers = nn.ModuleDict({name: model.layers[name] for name in self.names.values()})

    def forward(self, x: Tensor) -> Tensor:
        outputs: dict[str, Tensor] = {}
        x = x.view_as(x)  # torch's stages take the same tensors again, and recorded layers mark those they have seen
        for node, name in self.names.items():
            sources = [outputs.get(source, x) for source in self.inputs_of[node]] or [x]
            outputs[node] = self.layers[name](len(x), *sources)
        return outputs[node].reshape(len(x), -1).contiguous()


def torch_pipeline(
    *,
    profile: str,
    dilation: float,
    batch_size: int,
    batches: int,
    plan: str,
    schedule: str,
    num_microbatches: int,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """The same plan by `torch.distributed.pipelining`, as its tutorial has it; stages in the order of the ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    stages = read_plan(Path(plan)).stages
    rank, last = dist.get_rank(), len(stages) - 1
    part = Part(RecordedModel(profile, dilation, batch_size), stages[rank].nodes)
    stage = PipelineStage(part, rank, len(stages), torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    program = kind(stage, num_microbatches, loss_fn=lambda output, target: output.sum())
    clock = Clock()
    for _ in range(batches):
        x = torch.arange(batch_size)
        if rank == 0:
            program.step(x)
        elif rank == last:
            program.step(target=x, losses=[])
        else:
            program.step()
        part.zero_grad()
        clock.on_train_batch_end()
    return {"ends_s": clock.ends_s, "computed_s": clock.computed_s}


WORK = {"rehearsed": rehearsed, "torch_pipeline": torch_pipeline, "trained": trained}


def main(orders: Sequence[str] | Any = sys.stdin) -> None:
    """Forks for each order; the child answers on the standard output, which nothing else may use."""
    global _answers
    torch.set_num_threads(1)
    _answers = os.dup(1)
    os.dup2(2, 1)
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(order["port"])
            tell(_answer(order))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # it said nothing
            tell({"error": f"it ended with status {status}"})


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
