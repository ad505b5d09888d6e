"""LightningModules as users write them, to be trained as variants, and the separate runs to compare them with."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pl_pipe.strategies import FusionStrategy
from tests.fusion_models import LanguageModel, Recurrent, Residual

CLASSES = 10
SAMPLES, BATCH = 26, 4
"""Seven batches, the last of two."""
_alone: dict[str, tuple["Classifier", L.Trainer]] = {}


class Perceptron(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """A sequence model's outputs of the last place."""

    def __init__(self, inner: nn.Module, dropout: float) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(20, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.dropout(self.inner(tokens)[:, -1]))  # type: ignore[no-any-return]


def network(kind: str, dropout: float) -> nn.Module:
    if kind == "resnet":
        return nn.Sequential(Residual(), nn.Dropout(dropout))
    if kind == "dropping":
        convolutions = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(8, 8, 3), nn.Dropout2d(dropout))
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, CLASSES), nn.Dropout(dropout))
    if kind == "lstm":
        return Tokens(Recurrent(), dropout)
    if kind == "transformer":
        return Tokens(LanguageModel(), dropout)
    if kind == "attending":
        return Tokens(LanguageModel(dropout=dropout), dropout)
    return Perceptron(dropout)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


ADAMS_EPS = 1e-3
"""A bias before batch norm has no gradient but rounding's, of which the usual 1e-8 would make steps of a whole rate."""


class Classifier(L.LightningModule):
    """Batch norm, dropout, label smoothing, a metric, a schedule a step, hooks."""

    def __init__(
        self,
        kind: str = "perceptron",
        lr: float = 0.1,
        weight_decay: float = 0.0,
        dropout: float = 0.0,
        smoothing: float = 0.0,
        gamma: float = 0.9,
        reads: bool = False,
        optimizer: str = "sgd",
        width: int = 0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = network(kind, dropout)
        self.extra = nn.Linear(CLASSES, width) if width else None
        self.scale = Scale(factor)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.steps = 0
        self.epochs: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out if self.extra is None else out + self.extra(out).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        if self.hparams["reads"]:
            loss = F.cross_entropy(logits, y, label_smoothing=self.hparams["smoothing"])
        else:
            loss = self.scale(self.criterion(logits, y))
        self.steps += 1
        self.train_acc.update(logits, y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log_dict({"val_loss": self.criterion(logits, y), "val_acc": self.val_acc(logits, y)}, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.criterion(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.steps)
        self.log("seen", float(self.steps) * self.hparams["lr"])

    def configure_optimizers(self) -> Any:
        h = self.hparams
        if h["optimizer"] == "adamw":
            decay = h["weight_decay"]
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=h["lr"] / 10, weight_decay=decay, eps=ADAMS_EPS)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=h["lr"], momentum=0.9, weight_decay=h["weight_decay"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, h["gamma"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


def loader(
    kind: str = "perceptron",
    *,
    shuffle: bool = True,
    dtype: torch.dtype = torch.float64,
    batch: int = BATCH,
    seed: int | None = None,
) -> DataLoader[Any]:
    """With a `seed`, it draws from a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    own = None if seed is None else torch.Generator().manual_seed(seed)
    if kind in ("lstm", "transformer", "attending"):
        x = torch.randint(1, 20, (SAMPLES, 6), generator=generator)
    elif kind in ("resnet", "dropping"):
        x = torch.randn(SAMPLES, 3, 6, 6, generator=generator).to(dtype)
    else:
        x = torch.randn(SAMPLES, 8, generator=generator).to(dtype)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=shuffle, generator=own)


def trainer(**options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": "64-true",
        "num_sanity_val_steps": 1,
    }
    if any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ())):
        del defaults["enable_checkpointing"]
    if "plugins" in options:
        del defaults["precision"]
    return L.Trainer(**{**defaults, **options})


def fit_fused(
    variants: Any,
    *,
    seed: int = 1,
    options: Any = None,
    strategy: Any = None,
    dtype: Any = torch.float64,
    **settings: Any,
) -> tuple[FusionStrategy, L.Trainer]:
    """Variants of a classifier, trained together."""
    L.seed_everything(seed, verbose=False)
    module = Classifier(**settings)
    fused = FusionStrategy(variants, **(strategy or {}))
    running = trainer(strategy=fused, **(options or {}))
    kind = settings.get("kind", "perceptron")
    running.fit(module, loader(kind, dtype=dtype), loader(kind, shuffle=False, dtype=dtype))
    return fused, running


def fit_alone(
    variant: dict[str, Any], *, seed: int = 1, options: Any = None, dtype: Any = torch.float64, **settings: Any
) -> tuple[Classifier, L.Trainer]:
    """One of them, by plain Lightning; the same again is not trained again."""
    key = repr((sorted(variant.items()), seed, sorted((options or {}).items()), dtype, sorted(settings.items())))
    if key in _alone:
        return _alone[key]
    L.seed_everything(seed, verbose=False)
    module = Classifier(**{**settings, **variant})
    running = trainer(**(options or {}))
    kind = settings.get("kind", "perceptron")
    running.fit(module, loader(kind, dtype=dtype), loader(kind, shuffle=False, dtype=dtype))
    if "plugins" not in (options or {}):
        _alone[key] = module, running
    return module, running


def difference(left: nn.Module, right: nn.Module) -> float:
    """The largest in any parameter or buffer."""
    theirs = right.state_dict()
    return max((value.double() - theirs[name].double()).abs().max().item() for name, value in left.state_dict().items())
