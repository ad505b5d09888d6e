"""How close a pipeline comes to its slowest stage, beside torch.distributed.pipelining: layers that only sleep.

    python benchmarks/pipeline/efficiency.py            # --quick: 2 and 4 stages, one repeat

Every stage is one layer that sleeps 40 ms in forward and 80 ms in backward (`--forward-ms`, `--backward-ms`) for a
batch, so that stages do not compete for cores and what is measured is the pipeline: schedule, messages, Lightning's
loop. A micro-batch sleeps its share of that.

`step` is the time from one batch's end to the next one's: the median over the middle of a run, the filling and the
draining of the pipeline left out. `/ stage` divides it by what a stage takes alone: the sleeps, timed in the same run.
Both are medians over the repeats; the least and the most follow. `mean / stage` has the mean over the middle instead,
in which the machine's other work shows. The rows of a table alternate.

The peer is torch's Schedule1F1B with 4 micro-batches (8 over 8 stages: it refuses fewer micro-batches than stages), the
same layers, and its optimizer step. Plain Lightning with one layer in one process shows what its own loop takes.

Goals: pipedream within 1.08 of its slowest stage for 2, 4 and 8 stages, and at least 15 % less than the peer.
"""

import argparse
import itertools
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from ranks import busy, prepare, run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

BATCH, WIDTH = 8, 8


@dataclass(frozen=True)
class Work:
    """What every side does."""

    stages: int
    forward_s: float
    backward_s: float
    batches: int

    @property
    def middle(self) -> slice:
        """The batches between the filling and the draining of the pipeline."""
        return slice(max(8, 2 * self.stages), self.batches - 2)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0] * 1, None, None


class Sleeper(nn.Module):
    """A stage: it sleeps for as many samples as it gets."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_s, self.backward_s = work.forward_s, work.backward_s

    def forward(self, x: Tensor) -> Tensor:
        share = x.shape[0] / BATCH
        slept: Tensor = Nap.apply(self.linear(x), self.forward_s * share, self.backward_s * share)  # type: ignore[no-untyped-call]
        return slept


class Sleepers(L.LightningModule):
    def __init__(self, layers: Iterable[Sleeper]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def batch_ends(
    layers: Sequence[Sleeper],
    batches: int,
    *,
    devices: int,
    strategy: Any,
    epochs: int = 1,
    callbacks: Sequence[L.Callback] = (),
) -> list[float]:
    """When each batch ended, on this rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sleepers(layers), DataLoader(TensorDataset(torch.randn(batches * BATCH, WIDTH)), BATCH))
    return clock.times


def ours(work: Work, schedule: str | None, microbatches: int | None) -> list[float]:
    """When each batch ended, on this rank; without a schedule, in one process with plain Lightning."""
    torch.manual_seed(0)
    pipeline: Any = "auto"
    if schedule is not None:
        ends = [f"layers.{index}" for index in range(work.stages - 1)]
        pipeline = PipeDreamStrategy(schedule=schedule, num_microbatches=microbatches, split_points=ends, timeout_s=60)
    layers = [Sleeper(work) for _ in range(work.stages)]
    return batch_ends(layers, work.batches, devices=work.stages, strategy=pipeline)


def peer(work: Work, microbatches: int) -> list[float]:
    """The same for torch's pipeline, as its tutorial has it."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=work.stages)
    torch.manual_seed(0)
    rank, last = dist.get_rank(), work.stages - 1
    module = Sleeper(work)
    stage = PipelineStage(module, rank, work.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda output, target: output.pow(2).mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    times = []
    for _ in range(work.batches):
        x = torch.randn(BATCH, WIDTH)
        if rank == 0:
            schedule.step(x)
        elif rank == last:
            schedule.step(target=x, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group()
    return times


@dataclass
class Row:
    """One side, over the repeats."""

    name: str
    run: Callable[[Work], list[float]]
    steps_s: list[float] = field(default_factory=list)
    means_s: list[float] = field(default_factory=list)

    def measure(self, work: Work) -> None:
        ends = self.run(work)[work.middle]
        self.steps_s.append(statistics.median(after - before for before, after in itertools.pairwise(ends)))
        self.means_s.append((ends[-1] - ends[0]) / (len(ends) - 1))

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    def shown(self, stages: int, stage_s: float, peer_s: float | None) -> str:
        spread = f"{min(self.steps_s) / stage_s:.3f} to {max(self.steps_s) / stage_s:.3f}"
        mean = statistics.median(self.means_s) / stage_s
        beside = "" if peer_s is None else f"{self.step_s / peer_s:.2f}"
        step = f"{self.step_s * 1e3:.1f} ms | {self.step_s / stage_s:.3f}"
        return f"| {stages} | {self.name} | {step} | {spread} | {mean:.3f} | {beside} |"


def ours_row(schedule: str, microbatches: int | None) -> Row:
    name = schedule if microbatches is None else f"{schedule}, {microbatches} micro-batches"
    return Row(name, lambda work: run_ranks(ours, work.stages, work, schedule, microbatches)[0])


def peer_row(microbatches: int) -> Row:
    name = f"torch Schedule1F1B, {microbatches} micro-batches"
    return Row(name, lambda work: run_ranks(peer, work.stages, work, microbatches)[-1])


def stage_s(work: Work) -> float:
    """What the sleeps of a batch really take."""

    def slept(seconds: float) -> float:
        start = time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - start

    return sum(statistics.median(slept(wanted) for _ in range(9)) for wanted in (work.forward_s, work.backward_s))


def compare(work: Work, rows: list[Row], repeats: int) -> float:
    """Runs the rows in turn; what a stage takes alone."""
    alone = []
    for _ in range(repeats):
        alone.append(stage_s(work))
        for row in rows:
            row.measure(work)
    return statistics.median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="*", type=int, default=(2, 4, 8))
    parser.add_argument("--schedules", nargs="*", default=("pipedream", "pipedream_2bw", "1f1b", "gpipe"))
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--backward-ms", type=float, default=80.0)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepare()
    stages, repeats = ((2, 4), 1) if arguments.quick else (arguments.stages, arguments.repeats)
    batches = 24 if arguments.quick else arguments.batches
    forward_s, backward_s = arguments.forward_ms / 1e3, arguments.backward_ms / 1e3
    print(f"{busy()}; {repeats} repeats of {batches} batches\n")
    print("| stages | schedule | step | / stage | spread | mean / stage | / the peer |")
    print("|---|---|---|---|---|---|---|")
    one = Work(1, forward_s, backward_s, batches)
    plain = Row("plain Lightning, one process", lambda work: run_ranks(ours, 1, work, None, None)[0])
    print(plain.shown(1, compare(one, [plain], repeats), None), flush=True)
    for count in stages:
        work = Work(count, forward_s, backward_s, batches)
        several = max(4, count)  # 2BW and the peer refuse fewer than there are stages
        counts = {"pipedream": None, "pipedream_2bw": several, "1f1b": several, "gpipe": several}
        rows = [ours_row(schedule, counts[schedule]) for schedule in arguments.schedules]
        other = peer_row(several)
        stage = compare(work, [*rows, other], repeats)
        for row in (*rows, other):
            print(row.shown(count, stage, other.step_s), flush=True)
    print(f"\nafterwards {busy()}")


if __name__ == "__main__":
    main()
