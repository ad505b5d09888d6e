"""Models and data whose hooks, buffers and samplers uneven workers have to get right."""

from typing import Any

import lightning as L
import torch
from pipedream_models import CLASSES, FEATURES, MODELS, Mlp, tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from pl_pipe.callbacks.replicas import data_share


class Clamped(Mlp):
    """Changes gradients between the backward and the update."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.02)


class Buffered(L.LightningModule):
    """Has buffers that have no mean, or a complex one, drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("marks", torch.randint(100, (8,)))
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.rand(8)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.first(batch[0]))[:, self.order] * self.turns.real
        return F.cross_entropy(self.last(hidden), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS |= {model.__name__: model for model in (Clamped, Buffered)}


class Blocks(DistributedSampler[Any]):
    """Whole batches, in an order of its own for every epoch, divided as the trainer says."""

    def __iter__(self) -> Any:
        numbers = torch.arange(len(self.dataset))  # type: ignore[arg-type]
        if self.shuffle:
            numbers = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(100 + self.epoch))
        return iter(numbers.tolist()[self.rank :: self.num_replicas])


class WholeBatches(L.LightningDataModule):
    """Its data sets give batches, so its loaders have no batch sampler."""

    def __init__(self, *, samples: int, held: int) -> None:
        super().__init__()
        self._batches = [_batches(samples, 0), _batches(held, 1)]

    def train_dataloader(self) -> Any:
        return self._loader(self._batches[0], shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(self._batches[1], shuffle=False)

    def _loader(self, batches: list[Any], *, shuffle: bool) -> DataLoader[Any]:
        replicas, rank = data_share(self.trainer)
        order = Blocks(batches, num_replicas=replicas, rank=rank, shuffle=shuffle)  # type: ignore[arg-type]
        return DataLoader(batches, batch_size=None, sampler=order)  # type: ignore[arg-type]


def _batches(samples: int, seed: int) -> list[Any]:
    x, y = tensors("classes", samples, seed)
    return list(zip(x.split(4), y.split(4), strict=True))
