"""Small LightningModules for the pipeline strategy, and their data."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos import Transformer as DemoTransformer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

FEATURES, CLASSES = 6, 3
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


def scheduled(optimizer: torch.optim.Optimizer, name: str) -> dict[str, Any]:
    schedulers = torch.optim.lr_scheduler
    if name == "step":
        return {"scheduler": schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4)), "interval": "step"}
    if name == "epoch":
        return {"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
    return {"scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2), "monitor": "val_loss"}


class Trained(L.LightningModule):
    """What all have in common: one optimizer by name, perhaps a scheduler."""

    optimizer_name: str = "momentum"
    scheduler_name: str | None = None

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer_name](self.parameters())
        if self.scheduler_name is None:
            return optimizer
        if self.scheduler_name == "asked":
            decay = torch.optim.lr_scheduler.PolynomialLR(optimizer, int(self.trainer.estimated_stepping_batches))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}
        return {"optimizer": optimizer, "lr_scheduler": scheduled(optimizer, self.scheduler_name)}


class Mlp(Trained):
    """Logs a value of an early stage, a metric as an object, and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(FEATURES, 8), (8, 8), (8, 8), (8, CLASSES)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        early = self.layers[0](x)
        loss = F.cross_entropy(self.layers[1:](early), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("early_mean", early.mean(), on_step=False, on_epoch=True)
        self.log("early_max", early.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batches_mean", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_squared", float(self.current_epoch) ** 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", 1.0 + self.current_epoch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"classes": logits.argmax(1), "logits": logits}

    def _evaluate(self, batch: Any, name: str) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log_dict({f"{name}_loss": F.cross_entropy(logits, y), f"{name}_spread": logits.std()})
        self.log(f"{name}_acc", self.accuracy)


class Autoencoder(Trained):
    """Several calls in one step; the loss needs the input again, on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        z = self.encoder(x)
        loss = F.mse_loss(self.decoder(z), x)
        self.log("train_loss", loss)
        return loss


class Vae(Trained):
    """The divergence term needs what an early stage computed, and noise is drawn in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU())
        self.mean, self.deviation = nn.Linear(8, 4), nn.Linear(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, FEATURES))
        self.noise = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.deviation(h)
        z = mean + torch.exp(0.5 * log_variance) * (torch.randn_like(mean) if self.noise else 0.1)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(self.decoder(z), x) + 0.1 * divergence
        self.log("divergence", divergence)
        return loss


class QuietVae(Vae):
    def __init__(self) -> None:
        super().__init__()
        self.noise = False


class SharedEmbedding(Trained):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.head(self.body(self.embedding(tokens))).flatten(0, 1), targets.flatten())


class DeepBoring(BoringModel):
    """Lightning's own, with three layers instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8), nn.Linear(8, 2))  # type: ignore[assignment]


class Demo(LightningTransformer):
    """Lightning's demo as it is, but small, without dropout, and without a download."""

    def __init__(self) -> None:
        super().__init__(vocab_size=11)
        self.model = DemoTransformer(vocab_size=11, ninp=8, nhead=2, nhid=8, nlayers=1, dropout=0.0)

    def prepare_data(self) -> None:
        pass


class Frozen(Mlp):
    """Part of the parameters stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Bare(Trained):
    """The stage after the first split has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squash, self.last = nn.Linear(FEATURES, 8), nn.Softplus(), nn.Linear(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.last(self.squash(self.first(batch[0]))), batch[1])


class Normed(Trained):
    """Batch norm's statistics are buffers, of which a checkpoint has the last stage's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = torch.relu(self.norm(self.first(batch[0])))
        return F.cross_entropy(self.last(torch.relu(self.second(h))), batch[1])


class Eventful(Trained):
    """All that a step which runs again must not do twice, or do otherwise: masks, statistics, counts, carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Dropout(0.4)
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.middle, self.clip = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.last = nn.Linear(8, CLASSES)
        self.total = SumMetric(nan_strategy="disable")  # by default it reads every value
        self.steps = 0
        self.seen: list[int] = []
        self.carried: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen.append(batch_idx)
        h = self.drop(self.norm(self.first(batch[0])))
        if self.carried is not None:
            h = h + 0.1 * self.carried
        self.carried = h.detach().mean(0)
        self.total.update(h.detach().abs().sum())
        r = self.recurrent(h.view(-1, 2, 4))[0].flatten(1)
        r = self.middle(self.middle(r) + h)
        self.log("middle", r.mean(), on_step=False, on_epoch=True)
        return F.cross_entropy(self.last(self.clip(r) + h), batch[1])


class StepMetric(Mlp):
    """A metric that starts anew with every step, and asks nobody else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("step_acc", self.accuracy.compute(), on_step=False, on_epoch=True)
        self.accuracy.reset()
        return F.cross_entropy(logits, batch[1])


class CalledMetric(Mlp):
    """Metrics in their other form: called, which gives the batch's value too; and in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_batch_acc", self.other(self(batch[0]), batch[1]))

    def __init__(self) -> None:
        super().__init__()
        self.other = MulticlassAccuracy(CLASSES, average="macro")


class Collected(Mlp):
    """Metrics of one kind with other settings: they begin alike, and are not."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {f"top{k}": MulticlassAccuracy(CLASSES, top_k=k, average="micro") for k in (1, 2)}
        self.scores = MetricCollection({**kinds, "same": MulticlassPrecision(CLASSES, average="micro")})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.scores.update(logits, batch[1])
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


class LogsAgain(Mlp):
    """A name twice in one step, with other names between, and in a hook with all options by position."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("again", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_epoch=True, reduce_fx="sum")
        self.log("again", 3 * loss, on_step=True, on_epoch=True)
        self.log("samples", 2.0 * len(batch[0]), on_epoch=True, reduce_fx="sum")
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_position", 2.0, False, True, False, True, "mean", False, False)


class Tallies(Mlp):
    """A buffer that is no batch norm's, and counts what its replica has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Tallying(FEATURES)


class Tallying(nn.Sequential):
    def __init__(self, features: int) -> None:
        super().__init__(nn.Linear(features, 8), nn.Tanh())
        self.register_buffer("samples", torch.zeros(()))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.samples += x[:, 0].sum().detach()
        return super().forward(x)


class Groups(Mlp):
    """Parameter groups with other settings, in an order that is not the model's."""

    def configure_optimizers(self) -> Any:
        late, early = list(self.layers[2:].parameters()), list(self.layers[:2].parameters())
        return torch.optim.AdamW([{"params": late, "lr": 0.03}, {"params": early, "lr": 0.01, "weight_decay": 0.0}])


class Counting(Mlp):
    """What it computes depends on how many steps the trainer has done, which is more when it runs again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[0](batch[0]) / (1 + self.global_step)
        return F.cross_entropy(self.layers[1:](h), batch[1])


class InputAgain(Mlp):
    """The input is added to what the second layer returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[1](self.layers[0](x))
        return F.cross_entropy(self.layers[3](self.layers[2](h + F.pad(x, (0, 2)))), y)


class InputAgainLater(Mlp):
    """The same, but not from the first batch on: who looks at that one expects otherwise."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[1](self.layers[0](x))
        if self.global_step >= 2:
            h = h + F.pad(x, (0, 2))
        return F.cross_entropy(self.layers[3](self.layers[2](h)), y)


class ReadsLater(Mlp):
    """A number of the batch is read, but not from the first batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = batch[0].abs().max().item() if self.global_step >= 2 else 1.0
        return F.cross_entropy(self.layers(batch[0]) / scale, batch[1])


class ReadsBatch(Mlp):
    """Python decides by a number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        return F.cross_entropy(logits if batch[0].mean() > 0 else 0.5 * logits, batch[1])


class Transfers(Mlp):
    """A hook works on the batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]


class Uses(Mlp):
    """Much that follows from the batch, its shapes and its device, on the first and the last stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.to(self.device) for part in batch)
        assert x.device == self.device
        noise = 0.1 * torch.randn_like(x)
        keep = (x > 0).float() * torch.ones(FEATURES, device=x.device)
        kept = x[:, :2].clone()
        kept[:, 0] = 0
        logits = self.layers(x * keep + noise)
        weights = torch.linspace(1, 2, len(x), device=x.device) + kept.sum(1).abs() + torch.rand(len(x))
        one_hot = F.one_hot(y, CLASSES).float()
        return -(weights[:, None] * one_hot * logits.log_softmax(1)).mean()


# ---- models that are refused


class ReadsAcross(Mlp):
    """A value of layer 1 is read, and a later layer needs what layer 0 computed before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        early = self.layers[0](batch[0])
        middle = self.layers[1](early)
        if middle.mean().item() > 0.01:
            middle = middle * 0.5
        return F.cross_entropy(self.layers[3](self.layers[2](middle + early)), batch[1])


class Manual(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Mlp):
    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS["momentum"](self.layers[:2].parameters()), OPTIMIZERS["adamw"](self.layers[2:].parameters())]


class ReturnsNothing(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else None


class Fails(Mlp):
    """One rank meets an error in the middle of training."""

    failing_rank = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4 and self.global_rank == self.failing_rank:
            raise OSError("the disk is gone")
        return super().training_step(batch, batch_idx)


class Fails0(Fails):
    failing_rank = 0


class Fails2(Fails):
    failing_rank = 2


class PlateauByStep(Mlp):
    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "train_loss"},
        }


class OwnPlateau:
    """Goes by a metric as torch's does, and is none of its kind: Lightning is told so."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, metric: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OwnPlateauByStep(Mlp):
    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.parameters())
        config = {"scheduler": OwnPlateau(optimizer), "interval": "step", "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "reduce_on_plateau": True}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)


class Diverges(Mlp):
    """The loss is no number from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx >= 2 else loss


class Own(Mlp):
    """Its own backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    model.__name__: model
    for model in (
        *(
            Mlp,
            Autoencoder,
            Vae,
            QuietVae,
            SharedEmbedding,
            DeepBoring,
            BoringModel,
            Demo,
            Frozen,
            Bare,
            Normed,
            Groups,
            Eventful,
            Counting,
        ),
        *(InputAgain, InputAgainLater, ReadsLater, ReadsBatch, Transfers, Uses),
        CalledMetric,
        StepMetric,
        Collected,
        *(LogsAgain, Tallies),
        *(ReadsAcross, Manual, TwoOptimizers, ReturnsNothing, Fails0, Fails2, Diverges, Own, PlateauByStep),
        OwnPlateauByStep,
    )
}


def make(name: str, *, seed: int = 0, optimizer: str = "momentum", scheduler: str | None = None) -> L.LightningModule:
    torch.manual_seed(1000 + seed)
    model = MODELS[name]()
    if isinstance(model, Trained):
        model.optimizer_name, model.scheduler_name = optimizer, scheduler
    return model


# ---- data


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Noise is drawn with every access."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.3 * torch.randn(FEATURES), self.y[index]


class Unreadable(Augmented):
    """A sample that cannot be read, on one rank."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 13 and torch.distributed.get_rank() == 1:
            raise OSError("sample 13 cannot be read")
        return self.x[index], self.y[index]


class Counted(Augmented):
    """Every access is noted in a file of its rank, also those of workers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Path(f"loaded{os.environ.get('LOCAL_RANK', 0)}").open("a") as file:
            file.write(f"{len(self)}\n")
        return super().__getitem__(index)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Nobody knows how many will come."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.samples = list(zip(x, y, strict=True))

    def __iter__(self) -> Any:
        return iter(self.samples)


def tensors(kind: str, samples: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "tokens":
        tokens = torch.randint(0, 11, (samples, 6), generator=generator)
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if kind == "boring":
        return (torch.randn(samples, 32, generator=generator),)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, (x[:, :CLASSES] + 0.3 * torch.randn(samples, CLASSES, generator=generator)).argmax(1)


def loader(
    kind: str = "classes",
    *,
    samples: int = 18,
    batch_size: int = 4,
    seed: int = 0,
    shuffle: bool = False,
    workers: int = 0,
    first: int | None = None,
    sizes: Sequence[int] | None = None,
) -> DataLoader[Any]:
    """With `sizes`, batches of so many samples, one after the other."""
    found = tuple(tensor[:first] for tensor in tensors(kind, samples, seed))
    if kind == "boring":
        return DataLoader(found[0], batch_size, shuffle=shuffle)  # type: ignore[arg-type]
    kinds: dict[str, Any] = {"augmented": Augmented, "unreadable": Unreadable, "stream": Stream, "counted": Counted}
    data = kinds.get(kind, TensorDataset)(*found)
    if sizes is not None:
        ends = list(accumulate(sizes))
        batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        return DataLoader(data, batch_sampler=batches)
    return DataLoader(data, batch_size, shuffle=shuffle, num_workers=workers)
