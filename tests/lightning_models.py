"""LightningModules and data that use Lightning's interface to the full, for the support matrix."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from pipedream_models import CLASSES, FEATURES, Augmented, Mlp, Trained, loader, tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision


class Logs(Mlp):
    """Every form of `self.log`, in steps and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.running = MeanMetric()
        self.scores = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassPrecision(CLASSES)], prefix="train_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        early = self.layers[0](x)
        logits = self.layers[1:](early)
        loss = F.cross_entropy(logits, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("epoch_only", early.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("weighed", loss, on_epoch=True, on_step=False, batch_size=len(x))
        self.log("total", loss * len(x), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("unseen", loss, logger=False, on_step=False, on_epoch=True)
        self.log_dict({"number": float(batch_idx), "tensor": torch.tensor(2.0)}, on_step=True, on_epoch=True)
        self.log("first_rank", loss, rank_zero_only=True, on_step=False, on_epoch=True)
        self.running.update(loss.detach(), weight=len(x))
        self.log("running", self.running, on_step=False, on_epoch=True)
        self.scores.update(logits, y)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return loss

    def on_train_start(self) -> None:
        self.log("at_start", 7.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx), on_step=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zeroed", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", 3.0, sync_dist=True)


class Remembering(nn.Sequential):
    """Makes a table when it is first called, and a mask for each number of samples; keeps them as they are."""

    def __init__(self, *size: int) -> None:
        super().__init__(nn.Linear(*size), nn.Tanh())
        self.table: Tensor | None = None
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.table is None:
            self.table = torch.linspace(-0.1, 0.1, x.shape[1], device=x.device)
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.full((len(x), 1), 0.5, device=x.device)
        return x + self.table * self.masks[len(x)]


class Remembers(Mlp):
    """Its step asks for the optimizer and the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(layer[0].in_features, layer[0].out_features) for layer in self.layers]
        self.layers = nn.Sequential(*(Remembering(*size) for size in sizes))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("scheduled", self.lr_schedulers().last_epoch)
        return super().training_step(batch, batch_idx)


class SeveralLoaders(Mlp):
    """Validation and prediction over two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("together", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"test_loss_{dataloader_idx}", F.cross_entropy(self(batch[0]), batch[1]), add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"classes": self(batch[0]).argmax(1), "loader": dataloader_idx}


class MadeLate(Trained):
    """Layers come in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is None:
            sizes = [(FEATURES, 8), (8, 8), (8, 8), (8, CLASSES)]
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.body is not None
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.body is not None
        self.log("val_loss", F.cross_entropy(self.body(batch[0]), batch[1]))


class Masked(Mlp):
    """Dropout and batch norm, which do one thing in training and another in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)),
            nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
            nn.Linear(8, CLASSES),
        )
        self.modes: list[bool] = []
        self.layers[2].register_forward_hook(lambda module, *_: self.modes.append(module.training))


class HalfMasked(Masked):
    """Normalised only, so that training equals a single run's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1][0].p = self.layers[2][1].p = 0.0


class Overrides(Mlp):
    """Hooks around the optimizer and the batch, overridden as Lightning documents."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self._count("optimizer_step")
        if self.trainer.global_step < 4:  # a warm-up by hand
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self._count("optimizer_zero_grad")
        optimizer.zero_grad(set_to_none=True)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self._count("lr_scheduler_step")
        scheduler.step()

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self._count("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._count("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._count("on_after_batch_transfer")
        return [batch[0] * 2, batch[1]]


class AugmentsOnDevice(Mlp):
    """Draws in the hook after the transfer: every stage must see what the first one saw."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            return [batch[0] + 0.5 * torch.randn_like(batch[0]), batch[1]]
        return batch


class Keeps(Mlp):
    """Its own part of a checkpoint, hyper-parameters, and results kept from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8, "name": "kept"})
        self.kept: list[Tensor] = []
        self.loaded: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "inputs": batch[0].sum(), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.kept.append(loss)
        self.log("val_loss", loss)
        return {"loss": loss, "logits": logits}

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("val_kept", torch.stack(self.kept).mean())
        self.kept.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"steps": self.trainer.global_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


class NamedBatch(Mlp):
    """Takes its batch by names, from two training loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + 0.5 * F.cross_entropy(self(batch["b"][0]), batch["b"][1])


class Example(Mlp):
    """Has an example for the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, FEATURES)


class Skips(Mlp):
    """Ends an epoch early, as Lightning lets a hook do."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class StopsInStep(Mlp):
    """Only the rank that has the loss sees it: the others must be told."""

    limit_at = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.is_global_zero and self.trainer.global_step >= self.limit_at:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class ReadsText(Mlp):
    """Makes tensors of what came as texts and arrays."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, more = batch
        y = torch.tensor([int(text) for text in more["texts"]], device=x.device)
        scale = torch.as_tensor(more["scales"], device=x.device)
        loss = (F.cross_entropy(self(x), y, reduction="none") * scale).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss


class Averages(Mlp):
    """A buffer of the whole that the step assigns anew: it becomes the last stage's, which has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


class ClipsByHand(Mlp):
    """By torch's function, over all parameters it can see."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.3)
        clip_grad_norm_(self.layers[0].parameters(), 0.1, norm_type=torch.inf)
        clip_grad_norm_(self.layers[1].parameters(), 0.05, norm_type="inf")  # type: ignore[arg-type]


class SetsAfterRead(Mlp):
    """A weight of the loss that grows from step to step, but not on ranks that have left before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.weight * super().training_step(batch, batch_idx)
        loss.item()
        self.weight += 0.1
        return loss


class KeepsRead(SetsAfterRead):
    """Set before the read; what is read, and a buffer that follows from it, is kept for people to see."""

    last_loss = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.weight * Mlp.training_step(self, batch, batch_idx)
        self.weight += 0.1
        self.last_loss = loss.item()
        self.seen = loss.detach()
        return loss


class CountsAfterRead(Mlp):
    """A buffer that counts steps, of which the first stage, whose it is, does not hear."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        self.count()
        return loss

    def count(self) -> None:
        self.steps += 1


class RecountsAfterRead(CountsAfterRead):
    def count(self) -> None:
        self.steps = self.steps + 1


class UsesKept(CountsAfterRead):
    """Computes with a buffer of which earlier stages do not know where it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Mlp.training_step(self, batch, batch_idx) + 0.01 * self.steps
        loss.item()
        self.steps = loss.detach()
        return loss


class HalvesAfterRead(Mlp):
    """A rate that follows the loss, on the ranks that have it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 0:
            self.optimizers().param_groups[0]["lr"] *= 0.5
        return loss


class Backbone(Mlp):
    """Has the attribute that BackboneFinetuning asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[:2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(list(self.layers[2:].parameters()), lr=0.1)


LIGHTNING_MODELS: tuple[type[L.LightningModule], ...] = (
    *(Logs, Remembers, SeveralLoaders, MadeLate, Masked, HalfMasked, Overrides, AugmentsOnDevice, Keeps, NamedBatch),
    *(Example, Skips, StopsInStep, ReadsText, Backbone),
    *(Averages, ClipsByHand, SetsAfterRead, KeepsRead, CountsAfterRead, RecountsAfterRead, UsesKept, HalvesAfterRead),
)


# ---- data


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """No length, and shuffled by numbers it draws."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x, self.y = tensors("classes", samples, seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.x)).tolist():
            yield self.x[index], self.y[index]


class Resumable(DataLoader[Any]):
    """Says where it is, so that Lightning goes on within an epoch; plain loaders begin anew there."""

    given, start = 0, 0

    def __iter__(self) -> Any:
        self.given, self.start = self.start % len(self), 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Split(L.LightningDataModule):
    """Splits its data by chance in `setup`, and draws in every access."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def setup(self, stage: str) -> None:
        data = Augmented(*tensors("classes", 26, self.seed))
        self.training, self.validation = random_split(data, [18, 8])

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, 4)


class Meeting(Split):
    """Its ranks agree on a seed where loaders are made, and wait for one another."""

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy
        seed = strategy.broadcast(self.seed + strategy.global_rank)
        strategy.barrier()
        assert seed == self.seed
        return super().train_dataloader()


def stream(*, seed: int = 0, samples: int = 18, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Stream(samples, seed), batch_size)


def workers(*, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(Augmented(*tensors("classes", 18, seed)), 4, shuffle=True, num_workers=2)


def resumable(*, seed: int = 0, samples: int = 18, batch_size: int = 4) -> DataLoader[Any]:
    return Resumable(TensorDataset(*tensors("classes", samples, seed)), batch_size)


def two_at_once(*, seed: int = 0) -> CombinedLoader:
    return CombinedLoader({"a": loader(seed=seed), "b": loader(seed=seed + 1)}, "max_size_cycle")


def two_in_turn(*, seed: int = 0) -> list[DataLoader[Any]]:
    return [loader(seed=seed, samples=7), loader(seed=seed + 1, samples=10)]


def unlike_sizes(*, seed: int = 0, samples: int = 18) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors("classes", samples, seed)), 5)


def written(*, seed: int = 0) -> DataLoader[Any]:
    """Labels are texts in a tuple, weights an array, as a collate function with `zip(*batch)` gives them."""

    def collate(samples: list[Any]) -> Any:
        x, labels = zip(*samples, strict=True)
        more = defaultdict(list, texts=tuple(str(int(label)) for label in labels))
        more["scales"] = np.array([1.0 + float(row[0]) ** 2 for row in x], dtype=np.float32)
        return torch.stack(x), more

    return DataLoader(TensorDataset(*tensors("classes", 18, seed)), 4, collate_fn=collate)


DATA: dict[str, Callable[..., Any]] = {
    "loader": loader,
    "stream": stream,
    "resumable": resumable,
    "workers": workers,
    "two_at_once": two_at_once,
    "two_in_turn": two_in_turn,
    "unlike_sizes": unlike_sizes,
    "split": Split,
    "meeting": Meeting,
    "written": written,
}
