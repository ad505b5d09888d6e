"""What other stages' layers cost a rank: the forward of a rank that owns nothing, or only the last layer.

    python benchmarks/ghosts/run.py

Batches of two 224-pixel images; the transport is a stub that sends nothing and receives at once; the time of the rank's
own layer is taken out. Each line gives the first batch, and the median of the following ones with their quartiles.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pl_pipe.comm import Message
from pl_pipe.stages import Ownership, Pipe
from pl_pipe.tensors.ghosts import TensorSpec

MODELS = ("resnet50", "vit_b_16", "densenet121", "swin_t", "mobilenet_v2")
OWNED = ("nothing", "last layer")


class Stub:
    """A transport without other ranks."""

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def expect(self, message: Message, spec: TensorSpec) -> None: ...

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype)

    def flush(self) -> None: ...


class WithIdle(nn.Module):
    """A model beside a module that is never called: what a rank with nothing to do would own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.idle = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def called_leaves(model: nn.Module, images: Tensor) -> list[str]:
    order: dict[str, None] = {}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: order.setdefault(name))
        for name, module in model.named_modules()
        if next(module.children(), None) is None or isinstance(module, nn.MultiheadAttention)
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return list(order)


def owners(leaves: list[str], stages: int, owned: str) -> tuple[dict[str, int], int]:
    """Owners of the leaves by equal counts, and the stage that is measured."""
    plan = {name: (stages - 1) * index // len(leaves) for index, name in enumerate(leaves)}
    if owned == "last layer":
        plan[leaves[-1]] = stages - 1
    if owned == "nothing":
        plan["idle"] = stages - 1
    return plan, stages - 1


class OwnTime:
    """Adds up the time that a rank's own layers take, to take it out."""

    def __init__(self, model: nn.Module, plan: dict[str, int], stage: int) -> None:
        self.seconds = 0.0
        for name, owner in plan.items():
            if owner == stage:
                module = model.get_submodule(name)
                module.forward = self._timed(module.forward)  # type: ignore[method-assign]

    def _timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = plain(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return out

        return forward


def measure(name: str, stages: int, owned: str, batches: int) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model = WithIdle(torchvision.models.get_model(name, num_classes=10)).train()
    images, labels = torch.rand(2, 3, 224, 224), torch.randint(0, 10, (2,))
    plan, stage = owners(called_leaves(model, images), stages, owned)
    own = OwnTime(model, plan, stage)
    seconds = []
    ownership = Ownership.from_mapping(model, plan, stages=stages)
    with Pipe(model, ownership, stage=stage, transport=Stub()) as pipe:
        for number in range(batches + 1):
            own.seconds = 0.0
            start = time.perf_counter()
            with pipe.step(number, (images, labels)):
                F.cross_entropy(model(images), labels)
            seconds.append(time.perf_counter() - start - own.seconds)
    return seconds[0], seconds[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--stages", nargs="*", type=int, default=(2, 4))
    parser.add_argument("--owned", nargs="*", default=OWNED, choices=OWNED)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{'model':14} {'stages':>6}  {'owns':12} {'first batch':>12}  {'then, a batch':>14}")
    for name in arguments.models:
        for stages in arguments.stages:
            for owned in arguments.owned:
                first, later = measure(name, stages, owned, arguments.batches)
                low, middle, high = (1e3 * value for value in statistics.quantiles(later, n=4))
                spread = f"{middle:6.2f} ms ({low:.2f} to {high:.2f})"
                print(f"{name:14} {stages:6}  {owned:12} {first * 1e3:9.0f} ms  {spread}", flush=True)


if __name__ == "__main__":
    main()
