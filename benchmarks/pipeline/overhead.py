"""What the strategy costs a step: a pipeline of one stage beside plain Lightning, and a stage's own machinery.

    python benchmarks/pipeline/overhead.py              # --quick: fewer repeats

First table: `devices=1` with PipeDreamStrategy and with SingleDeviceStrategy, in one process, taking turns; one thread.
`step` is the median of a run's steps, and its median over the runs; `ratio` compares each run with the one beside it,
and is given with quartiles. CPU time is shown as well, since other work on the machine moves it less. Goal: at most 2 %
more, for steps of 20 ms and longer; what a tiny step pays is shown in microseconds.

Second table: what a batch costs a rank of ResNet-18 over three stages besides its own layers, forward and backward:
ghosts of the other stages' layers, weights put in place and kept, messages handed to a transport that does nothing.
It is the time of `Executor.advance`, `hand_over` and `begin_update` less that of the layers' forwards and of autograd.
"""

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.demos import Transformer
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks import busy, prepare
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.comm import Message
from pl_pipe.runtime.executor import Executor
from pl_pipe.runtime.executor_settings import ExecutorSettings
from pl_pipe.runtime.mini_batch import MiniBatch
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.schedule import reading_of
from pl_pipe.stages import Ownership, Pipe
from pl_pipe.strategies import PipeDreamStrategy
from pl_pipe.tensors.ghosts import TensorSpec

# ---- one stage


class Wrapped(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        *inputs, labels = batch
        scores = self.model(*inputs)
        loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def cnn() -> tuple[nn.Module, TensorDataset]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    return model, TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


def transformer() -> tuple[nn.Module, TensorDataset]:
    words = torch.randint(0, 1000, (4, 35))
    return Transformer(vocab_size=1000, ninp=64, nhid=64), TensorDataset(words, words, words.roll(-1, 1))


def tiny() -> tuple[nn.Module, TensorDataset]:
    return nn.Linear(32, 2), TensorDataset(torch.randn(16, 32), torch.randint(0, 2, (16,)))


MODELS: dict[str, Callable[[], tuple[nn.Module, TensorDataset]]] = {
    "small CNN": cnn,
    "Lightning's transformer demo": transformer,
    "one Linear": tiny,
}


class Clock(L.Callback):
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def one_run(make: Callable[[], tuple[nn.Module, TensorDataset]], strategy: Any, steps: int) -> tuple[float, float]:
    """Seconds a step, by the clock and of this process's time."""
    torch.manual_seed(0)
    model, data = make()
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wrapped(model), DataLoader(Repeated(data, steps), batch_size=None))
    wall, cpu = ([after - before for before, after in itertools.pairwise(t)][2:-1] for t in (clock.wall, clock.cpu))
    return statistics.median(wall), statistics.median(cpu)


class Repeated(torch.utils.data.Dataset[list[Tensor]]):
    """The same batch, again and again: loading must not hide what is measured."""

    def __init__(self, data: TensorDataset, steps: int) -> None:
        self.batch, self.steps = list(data.tensors), steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.batch


def compare(name: str, repeats: int, steps: int) -> str:
    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    for repeat in range(repeats):
        sides: list[tuple[list[Any], Any]] = [(ours, PipeDreamStrategy), (plain, SingleDeviceStrategy)]
        for found, strategy in sides if repeat % 2 else reversed(sides):
            found.append(one_run(MODELS[name], strategy(), steps))
    cells = []
    for kind in (0, 1):
        ratios = [one[kind] / other[kind] for one, other in zip(ours, plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    step = [statistics.median(side) for side in ([run[0] for run in plain], [run[0] for run in ours])]
    more = statistics.median([(one[0] - other[0]) * 1e6 for one, other in zip(ours, plain, strict=True)])
    return f"| {name} | {step[0] * 1e3:.2f} ms | {step[1] * 1e3:.2f} ms | {cells[0]} | {cells[1]} | {more:.0f} us |"


# ---- a stage of several


class Stub:
    """A transport without other ranks."""

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def expect(self, message: Message, spec: TensorSpec) -> None: ...

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype)

    def flush(self, *, before: int | None = None) -> None: ...


class Stopwatch:
    """Adds up the time of what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def machinery(stage: int, batches: int) -> list[float]:
    """Seconds a batch besides the stage's own layers."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    order = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc")
    plan = {
        f"{top}.{leaf}" if leaf else top: min(2, index // 5 + (index > 5))
        for index, top in enumerate(order)
        for leaf, module in model.get_submodule(top).named_modules()
        if next(module.children(), None) is None
    }
    work = Stopwatch()
    for name, owner in plan.items():
        if owner == stage:
            module = model.get_submodule(name)
            module.forward = work.timed(module.forward)
    ownership = Ownership.from_mapping(model, plan, stages=3)
    images, labels = torch.rand(2, 3, 64, 64), torch.randint(0, 10, (2,))
    found, plain = [], torch.autograd.backward
    torch.autograd.backward = work.timed(plain)
    try:
        with Pipe(model, ownership, stage=stage, transport=Stub()) as pipe:
            warmup = 2 - stage
            executor = Executor(
                stepper=pipe,
                parameters=dict(pipe.own_named_parameters()),
                settings=ExecutorSettings(
                    "pipedream", warmup, 1, reading_of("pipedream", update_every=1), versioned=warmup > 0
                ),
                numbers=StepNumbers(),
            )
            step = MiniBatch((images, labels), lambda _: F.cross_entropy(model(images), labels))
            for _ in range(batches + 5):
                work.seconds, start = 0.0, time.perf_counter()
                update = executor.advance([step])
                if update is not None:
                    executor.hand_over(update)
                    executor.begin_update()
                found.append(time.perf_counter() - start - work.seconds)
    finally:
        torch.autograd.backward = plain
    return found[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepare()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    repeats = 4 if arguments.quick else arguments.repeats
    print(f"{busy()}; {repeats} pairs of runs of {arguments.steps} steps\n")
    print("| model | plain step | one stage | ratio | ratio of CPU time | more a step |")
    print("|---|---|---|---|---|---|")
    for name in arguments.models:
        print(compare(name, repeats, arguments.steps), flush=True)
    print("\n| ResNet-18, pipedream, 3 stages | a batch, besides the stage's own layers |")
    print("|---|---|")
    for stage, place in enumerate(("first", "middle", "last")):
        low, middle, high = (1e6 * value for value in statistics.quantiles(machinery(stage, 60), n=4))
        print(f"| {place} stage | {middle:.0f} us ({low:.0f} to {high:.0f}) |", flush=True)
    print(f"\nafterwards {busy()}")


if __name__ == "__main__":
    main()
