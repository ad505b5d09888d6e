"""What `FusionStrategy` takes through `trainer.fit`, against the same variants one after another by plain Lightning.

    python benchmarks/fusion/through_trainer.py --threads 1 --models perceptron mobilenet --variants 1 4 8

Steps are timed by a callback, between the ends of batches, in CPU seconds of the process, for which other work on the
machine counts less; the median counts, after the formulations were compared.
Fused and separate runs alternate, and the median of the ratios is given: above 1 where fusion is quicker.
"""

import argparse
import itertools
import logging
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import FusionStrategy

IMAGES = {"mobilenet": 32, "resnet18": 32, "convolutions": 28}
_SETTLED = 12
"""Steps before timing: formulations are compared in the first eight."""


class Network(L.LightningModule):
    def __init__(self, model: str, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build(model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)


def build(model: str) -> nn.Module:
    if model == "perceptron":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    if model == "convolutions":
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 25, 10)),
        )
    name = "mobilenet_v2" if model == "mobilenet" else model
    return torchvision.models.get_model(name, num_classes=10)


def data(model: str, batch: int, steps: int) -> DataLoader[Any]:
    size = IMAGES.get(model)
    x = torch.randn(batch * steps, 64) if size is None else torch.randn(batch * steps, 3, size, size)
    return DataLoader(TensorDataset(x, torch.randint(0, 10, (batch * steps,))), batch_size=batch)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())

    def step_s(self, first: int) -> float:
        ends = self.ends[first:]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def step_s(model: str, batch: int, steps: int, strategy: Any) -> float:
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    L.seed_everything(1, verbose=False)
    trainer.fit(Network(model), data(model, batch, steps))
    return clock.step_s(_SETTLED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["perceptron", "convolutions", "mobilenet", "resnet18"])
    parser.add_argument("--variants", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formulation", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for model in options.models:
        for count in options.variants:
            ratios, alone, formulation = [], 0.0, ""
            for _ in range(options.repeats):
                alone = step_s(model, options.batch, options.steps, "auto")
                rates = [0.01 * (place + 1) for place in range(count)]
                strategy = FusionStrategy({"lr": rates}, formulation=options.formulation)
                fused = step_s(model, options.batch, options.steps, strategy)
                assert strategy.fusion_facts is not None
                formulation = strategy.fusion_facts.chosen["training_step"]
                ratios.append(count * alone / fused)
            print(
                f"{model:14} {count:2} variants  {statistics.median(ratios):.2f} times as fast as one after another "
                f"({min(ratios):.2f} to {max(ratios):.2f}), as {formulation}; alone {1e3 * alone:.2f} ms a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
