"""How far a pipeline's losses are from a single process's: the synchronous schedules over 50 steps.

    python benchmarks/pipeline/exactness.py             # --quick: 10 steps, 2 stages

Every model trains once in one process with plain Lightning, then by plans over 2 to 4 processes, replicated stages
among them, with `1f1b` and `gpipe`, on the same batches; the last batch of an epoch is smaller. The largest difference
of two losses of the same step is shown, as rank 0 sees them in `on_train_batch_end`. Each process has one thread,
dropout is off.

With one micro-batch every number is computed by the same operations in the same order: the difference is zero. With
several, a mean over the batch is made of means over micro-batches, and sums are rounded in another order: about 1e-7 of
a float, which training then carries on, and the more the faster it learns: VGG with a learning rate of 0.05 and
momentum 0.9, instead of the 0.01 and none of this table, is 6e-4 away after 50 steps. In double precision (`64-true`)
the same runs show that this is rounding.
Batch norm is another matter: it normalizes by the statistics of what it is given, so several micro-batches are another
model than one batch, in a single process as well. Its row with several micro-batches is therefore no error.

Goal: at most 1e-6 (batch norm: with one micro-batch).
"""

import argparse
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.demos import Transformer
from ranks import busy, prepare, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

BATCH, SMALLER, CLASSES, WORDS = 8, 5, 10, 40


class Attention(nn.Module):
    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        weights = torch.softmax(query @ memory.transpose(1, 2) / math.sqrt(query.shape[-1]), dim=-1)
        return torch.cat((query, weights @ memory), dim=-1)


class EncoderDecoder(nn.Module):
    """LSTMs with attention: the decoder reads the encoder's last state, the attention all of its outputs."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.target = nn.Embedding(WORDS, width)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.attention = Attention()
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        output, _ = self.decoder(self.target(target), state)
        words: Tensor = self.head(torch.tanh(self.mix(self.attention(output, memory))))
        return words


def vgg() -> nn.Module:
    features = torchvision.models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"])
    head = (nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    return nn.Sequential(*features, *head)


def transformer() -> nn.Module:
    return Transformer(vocab_size=WORDS, ninp=32, nhead=2, nhid=64, nlayers=2, dropout=0.0)


def resnet() -> nn.Module:
    model: nn.Module = torchvision.models.resnet18(num_classes=CLASSES)
    return model


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: str
    splits: dict[int, tuple[str, ...]]
    """By the number of stages: after which modules a stage ends."""
    pixels: int = 32
    batch_norm: bool = False
    lr: float = 0.05


CASES: dict[str, Case] = {
    "VGG": Case(vgg, "images", {2: ("4",), 3: ("4", "8"), 4: ("2", "5", "10")}, lr=0.01),
    "ResNet-18": Case(
        resnet,
        "images",
        {2: ("layer2",), 3: ("layer1", "layer3"), 4: ("layer1", "layer2", "layer3")},
        pixels=64,  # at 32 its last maps have one value, and batch norm refuses a micro-batch of one sample
        batch_norm=True,
        lr=0.005,
    ),
    "LSTM encoder-decoder": Case(
        EncoderDecoder,
        "sentences",
        {2: ("encoder",), 3: ("encoder", "decoder"), 4: ("source", "encoder", "decoder")},
    ),
    "transformer": Case(
        transformer,
        "sentences",
        {
            2: ("transformer.encoder",),
            3: ("transformer.encoder", "transformer.decoder.layers.0"),
            4: ("transformer.encoder.layers.0", "transformer.encoder", "transformer.decoder.layers.0"),
        },
    ),
}


class Classifier(L.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.build()
        self.case = case

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        *inputs, labels = batch
        scores = self.model(*inputs)
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.case.lr)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def data_of(case: Case, batches: int) -> TensorDataset:
    count, random = (batches - 1) * BATCH + SMALLER, torch.Generator().manual_seed(1)
    if case.inputs == "images":
        labels = torch.randint(0, CLASSES, (count,), generator=random)
        images = torch.randn(count, 3, case.pixels, case.pixels, generator=random) + 0.1 * labels.view(-1, 1, 1, 1)
        return TensorDataset(images.to(torch.get_default_dtype()), labels)
    source = torch.randint(0, WORDS, (count, 11), generator=random)
    target = source.flip(1)
    return TensorDataset(source, target, target.roll(-1, 1))


Plan = tuple[int, ...]


def losses(name: str, schedule: str | None, plan: Plan, microbatches: int, steps: int, double: bool) -> list[float]:
    """This rank's losses; without a schedule, in one process with plain Lightning."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case, seen, epochs = CASES[name], Losses(), 5
    L.seed_everything(3, verbose=False)
    if double:
        torch.set_default_dtype(torch.float64)
    pipeline: Any = "auto"
    if schedule is not None:
        pipeline = PipeDreamStrategy(
            schedule=schedule,
            num_microbatches=microbatches,
            split_points=[f"model.{module}" for module in case.splits[len(plan)]],
            replicas=plan,
            timeout_s=60,
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=sum(plan),
        strategy=pipeline,
        precision="64-true" if double else "32-true",
        max_epochs=epochs,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(case), DataLoader(data_of(case, steps // epochs), BATCH))
    return seen.values


def difference(ones: list[float], others: list[float]) -> str:
    if len(ones) != len(others):
        return f"{len(ones)} losses, {len(others)} in the single run"
    found = max(abs(one - other) for one, other in zip(ones, others, strict=True))
    return f"{found:.1e}" if found else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=tuple(CASES), choices=tuple(CASES))
    parser.add_argument("--plans", nargs="*", default=("1-1", "1-1-1", "1-1-1-1", "2-1", "2-2", "3-1"))
    parser.add_argument("--schedules", nargs="*", default=("1f1b", "gpipe"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepare()
    names, steps = (("1-1",), 10) if arguments.quick else (arguments.plans, arguments.steps)
    plans = [tuple(map(int, plan.split("-"))) for plan in names]
    print(f"{busy()}; {steps} steps, batches of {BATCH} and a last one of {SMALLER}\n")
    print("| model | schedule | plan | 1 micro-batch | several | several, double | loss, first to last |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        alone = {double: run_ranks(losses, 1, name, None, (1,), 1, steps, double)[0] for double in (False, True)}
        for schedule in arguments.schedules:
            for plan in plans:
                several = lcm(*plan) * len(plan)
                runs = [(1, False), (several, False), (several, True)]
                if CASES[name].batch_norm:
                    runs.pop()  # another model, whatever the precision
                cells = []
                for count, double in runs:
                    if count < max(plan):  # some replicas would have none
                        cells.append("")
                        continue
                    found = run_ranks(losses, sum(plan), name, schedule, plan, count, steps, double)[0]
                    cells.append(difference(found, alone[double]))
                if CASES[name].batch_norm:
                    cells[1:] = [f"({cells[1]}: batch norm)", ""]
                shown = f"{alone[False][0]:.2f} to {alone[False][-1]:.2f}"
                shape = "-".join(map(str, plan))
                print(f"| {name} | {schedule} | {shape} | {' | '.join(cells)} | {shown} |", flush=True)
    print(f"\nafterwards {busy()}")


if __name__ == "__main__":
    main()
