"""How much of a step its measured layers explain, and what recording costs.

    python benchmarks/profiler/run.py                    # on the CPU
    python benchmarks/profiler/run.py --device cuda --pixels 224 --batch 64

Coverage is the sum of the layers' times over the time of the whole forward and backward pass, which is measured without
looking into it, in the same run, in turn with the timed passes. Each model is profiled `--rounds` times; the median
and the range are printed. 1.00 means that the layers explain the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pl_pipe
from pl_pipe.tensors import Recorder

VISION = ("resnet18", "densenet121", "mobilenet_v2", "vit_b_32", "swin_t")


class Translator(nn.Module):
    """An LSTM encoder and decoder with attention."""

    def __init__(self, words: int = 2000, width: int = 256) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(2 * width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(tokens))
        hidden, _ = self.decoder(self.target(tokens), state)
        context, _ = self.attention(hidden, memory, memory)
        return self.out(torch.cat([hidden, context], dim=-1))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def next_word(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch, batch) if isinstance(model, Transformer) else model(batch)
    return cross_entropy(scores.flatten(0, -2), batch.flatten())


def models(pixels: int, batch: int) -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Any]]:
    images = (torch.rand(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,)))
    found: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Any]] = {}
    for name in VISION:
        extra = {"image_size": pixels} if name.startswith("vit") else {}
        found[name] = (lambda name=name, extra=extra: torchvision.models.get_model(name, **extra), classify, images)
    tokens = torch.randint(0, 2000, (batch, 32))
    found["lstm translator"] = (Translator, next_word, tokens)
    found["lightning transformer"] = (lambda: Transformer(vocab_size=2000), next_word, tokens)
    return found


def recording_s(model: nn.Module, step: Callable[..., Tensor], batch: Any) -> float:
    began = time.perf_counter()
    with Recorder(model, batch) as recorder:
        step(model, batch)
    recorder.recording()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'model':<24}{'layers':>7}{'step ms':>9}{'coverage':>10}  {'range':<12}recorded in s")
    for name, (build, step, batch) in models(arguments.pixels, arguments.batch).items():
        torch.manual_seed(0)
        recorded = recording_s(build(), step, batch)
        model = build()
        profiles = [
            pl_pipe.profile(model, batch, step=step, device=arguments.device, repeats=arguments.repeats)
            for _ in range(arguments.rounds)
        ]
        coverage = [profile.coverage for profile in profiles]
        step_ms = 1e3 * statistics.median(profile.step_s for profile in profiles)
        spread = f"{min(coverage):.2f}-{max(coverage):.2f}"
        layers = len(profiles[0].graph.nodes) - 1
        print(f"{name:<24}{layers:>7}{step_ms:>9.1f}{statistics.median(coverage):>10.3f}  {spread:<12}{recorded:.2f}")


if __name__ == "__main__":
    main()
