"""Training steps of M variants: one array against the same models one after another, on the CPU.

    python benchmarks/fusion/cpu.py [--models mlp cnn …] [--variants 1 4 8] [--repeats 9]

A step is forward, cross entropy, backward and SGD with momentum, each variant with its own rate. Both sides run in turn
in one process, on the same batches; the ratio is serial time over fused time, with quartiles over the repeats.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.optim import SGD

from pl_pipe.fusion import Preference, VariantArray


class SmallNet(nn.Module):
    """Two convolutions for handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(64, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.out(self.encoder(self.embedding(tokens), mask=mask, is_causal=True)).flatten(0, 1)  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _images(channels: int, size: int, samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, channels, size, size), torch.randint(0, 10, (samples,))


def _sentences() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 500, (8, 33))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (_mlp, lambda: _images(1, 28, 16)),
    "cnn": (SmallNet, lambda: _images(1, 28, 16)),
    "transformer": (LanguageModel, _sentences),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), lambda: _images(3, 32, 16)),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=10), lambda: _images(3, 32, 16)),
}


def _step(run: Callable[[Tensor], list[Tensor]], optimizers: list[SGD], x: Tensor, y: Tensor) -> None:
    torch.stack([F.cross_entropy(out, y) for out in run(x)]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _serial_step(models: list[nn.Module], optimizers: list[SGD], x: Tensor, y: Tensor) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(name: str, variants: int, repeats: int, chooser: Preference) -> tuple[list[float], list[float]]:
    """Seconds a step, serial and fused."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    serial = [build() for _ in range(variants)]
    fused = copy.deepcopy(serial)
    array = VariantArray(fused, chooser=chooser)
    rates = [0.01 * (j + 1) for j in range(variants)]
    of_serial, of_fused = (
        [SGD(model.parameters(), lr=rate, momentum=0.9) for model, rate in zip(models, rates, strict=True)]
        for models in (serial, fused)
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        x, y = batch()
        start = time.perf_counter()
        _serial_step(serial, of_serial, x, y)
        middle = time.perf_counter()
        _step(array, of_fused, x, y)
        end = time.perf_counter()
        if repeat:  # the first is for warming up
            seconds[0].append(middle - start)
            seconds[1].append(end - middle)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variants", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--convolutions", default="", help="grouped, batched matmul or branches, where possible")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    chooser = Preference({"conv2d": [arguments.convolutions]} if arguments.convolutions else {})
    print(f"{'model':14} {'variants':>8}  {'serial':>10}  {'fused':>10}  ratio (quartiles)")
    for name in arguments.models:
        for variants in arguments.variants:
            serial, fused = measure(name, variants, arguments.repeats, chooser)
            ratios = [one / other for one, other in zip(serial, fused, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            times = f"{statistics.median(serial) * 1e3:7.1f} ms  {statistics.median(fused) * 1e3:7.1f} ms"
            print(f"{name:14} {variants:8}  {times}  {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
