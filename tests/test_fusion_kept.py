"""What steps collect in Python (lists, counters, meters) is, for every variant, what its separate run has collected."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import CLASSES, Classifier, difference, loader, trainer

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.03, "weight_decay": 0.05}, {"lr": 0.3}]
STEP_BY_STEP = ["array", "model array", "one by one", "auto"]


class Meter:
    """As they are copied from one repository to another."""

    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.count = 0
        self.history: list[Any] = []

    def update(self, value: Tensor, n: int) -> None:
        self.sum = self.sum + value * n
        self.count += n
        self.history.append(value)


@dataclass
class Output:
    logits: Tensor
    labels: Tensor
    size: int


class ModelOutput(OrderedDict[str, Any]):
    """Refuses what the outputs of Hugging Face's models refuse."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("no update")

    def __delitem__(self, key: str) -> None:
        raise TypeError("no deletion")


class Counting(nn.Module):
    """A part of the model with a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return x


class Epochs(Classifier):
    """Lightning 2's pattern: lists that a step fills and the epoch's end puts together and clears."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.preds: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.sizes: list[int] = []
        self.outputs: list[dict[str, Any]] = []
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.preds.append(logits.argmax(1))
        self.targets.append(y)
        self.sizes.append(len(y))
        self.outputs.append({"loss": self.criterion(logits, y), "both": (logits, y), "number": batch_idx})

    def on_validation_epoch_end(self) -> None:
        preds, targets = torch.cat(self.preds), torch.cat(self.targets)
        loss = torch.stack([out["loss"] * size for out, size in zip(self.outputs, self.sizes, strict=True)]).sum()
        self.log("val_loss", loss / sum(self.sizes))
        self.log("val_acc", (preds == targets).double().mean())
        numbers = [out["number"] for out in self.outputs]
        self.found.append([preds, targets, loss, numbers, torch.cat([out["both"][0] for out in self.outputs])])
        for one in (self.preds, self.targets, self.sizes, self.outputs):
            one.clear()

    def on_train_epoch_end(self) -> None: ...


class Collects(Epochs):
    """The training step collects too, in whatever can hold something."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.meter = Meter()
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        self.recent: deque[Any] = deque(maxlen=3)
        self.labels: set[int] = set()
        self.total = torch.zeros(())
        self.counting = Counting()
        self.unregistered = {"acc": MulticlassAccuracy(CLASSES, average="micro")}
        self.alias = self.by_name
        self.counter: Counter[int] = Counter()
        self.table = np.zeros(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(self.counting(x))
        loss = self.criterion(logits, y)
        self.meter.update(loss.detach(), len(y))
        self.by_name["loss"].append(loss.detach())
        self.by_name["size"].append(len(y))
        self.recent.append((batch_idx, y, Output(logits.detach(), y, len(y))))
        self.labels.add(int(y[0]))
        self.table[int(y[0])] += 1
        self.total += len(y)
        self.last_y = y
        self.last = Output(logits.detach(), y, batch_idx)
        self.last_out = ModelOutput()
        self.last_out["logits"] = logits.detach()
        self.counter[len(y)] += 1
        self.unregistered["acc"].update(logits, y)
        return loss

    def kept(self) -> Any:
        recent = [(number, y, vars(out)) for number, y, out in self.recent]
        meter, last = vars(self.meter), vars(self.last)
        counts = self.counting.calls, self.counting.shapes, self.labels, self.total, self.last_y
        accuracy = self.unregistered["acc"].compute()
        counts = (*counts, dict(self.counter), self.table.tolist(), dict(self.last_out))
        return [self.found, meter, dict(self.by_name), recent, last, counts, accuracy, self.alias is self.by_name]


@cache
def alone(module: Any, number: int) -> tuple[Any, L.Trainer]:
    L.seed_everything(1, verbose=False)
    separate, plain = module(**VARIANTS[number]), trainer(max_epochs=2)
    plain.fit(separate, loader(), loader(shuffle=False))
    return separate, plain


def fit(module: Any, formulation: str) -> tuple[Any, L.Trainer]:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS, formulation=formulation)
    running = trainer(strategy=fused, max_epochs=2)
    running.fit(module(), loader(), loader(shuffle=False))
    return fused, running


def assert_same(found: Any, expected: Any) -> None:
    """Nested alike, with the same numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.shape == expected.shape
        assert torch.allclose(found.double(), expected.double(), rtol=0, atol=1e-9)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    else:
        assert found == expected


@pytest.mark.parametrize("formulation", [*STEP_BY_STEP, "branches", "captured array"])
def test_epochs_that_are_put_together_from_lists(formulation: str) -> None:
    fused, running = fit(Epochs, formulation)
    for number in range(len(VARIANTS)):
        separate, plain = alone(Epochs, number)
        assert_same(fused.variants[number].found, separate.found)
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


@pytest.mark.parametrize("formulation", STEP_BY_STEP)
def test_whatever_a_step_collects_in(formulation: str, caplog: pytest.LogCaptureFixture) -> None:
    fused, _ = fit(Collects, formulation)
    assert "not computed" not in caplog.text
    for number in range(len(VARIANTS)):
        separate, _ = alone(Collects, number)
        assert difference(separate, fused.variants[number]) <= 1e-9
        assert_same(fused.variants[number].kept(), separate.kept())


class Totals(Epochs):
    """Tensors that a validation counts in, in place and anew, and that its end sets to zero."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen, self.hits, self.table = torch.zeros(()), torch.zeros(()), {"sum": torch.zeros(CLASSES)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        logits, y = self.outputs[-1]["both"]
        self.seen += len(y)
        self.hits = self.hits + (logits.argmax(1) == y).sum()
        if batch_idx == 0:
            self.table["sum"] = logits.sum(0)
        else:
            self.table["sum"] += logits.sum(0)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.found.append([self.seen.clone(), self.hits.clone(), self.table["sum"].clone()])
        for one in (self.seen, self.hits, self.table["sum"]):
            one.zero_()


@pytest.mark.parametrize("formulation", STEP_BY_STEP)
def test_tensors_that_a_validation_counts_in(formulation: str) -> None:
    fused, _ = fit(Totals, formulation)
    for number in range(len(VARIANTS)):
        assert_same(fused.variants[number].found, alone(Totals, number)[0].found)


class Refused(Collects):
    """Turns out not to be an array after everything has been collected."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.by_name["read"].append(loss.item())
        return loss


def test_what_a_failed_way_has_collected_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """Also inside objects, nested lists, and tensors that are counted in."""
    fused, _ = fit(Refused, "auto")
    assert "not computed as array, but model array" in caplog.text
    for number in range(len(VARIANTS)):
        assert_same(fused.variants[number].kept(), alone(Refused, number)[0].kept())


class Own(Epochs):
    """Counts on from numbers that a hook makes each variant's own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rates: deque[float] = deque(maxlen=2)

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.hparams["lr"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(float(batch_idx))  # which moves what was there
        return super().training_step(batch, batch_idx)


def test_what_differs_is_not_copied_from_the_first(caplog: pytest.LogCaptureFixture) -> None:
    fused, _ = fit(Own, "auto")
    assert "reads 'rates', which differs between the variants" in caplog.text
    for number in range(len(VARIANTS)):
        assert fused.variants[number].rates == alone(Own, number)[0].rates


class Keeps(nn.Module):
    """Of plain modules: a layer that collects, moves and forgets."""

    def __init__(self, shared: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.states: list[Any] = []
        self.pair: Any = None
        self.table: dict[str, Any] = {"layer": self.layer, "scale": torch.ones(3)}
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.table["scale"]
        self.states.append((out.detach(), [x]))
        self.states[0][1].append(len(self.states))
        self.pair = (self.pair, self.states[-1]) if self.pair is None else (self.pair[1], self.states[-1])
        self.table["scale"] += 1
        self.table["last"] = self.states[-1]
        if len(self.states) == 3:
            del self.states[0]
            self.states[0][1].append(-1)
        if self.shared is not None:
            self.shared.append(1)
        return out


def test_plain_modules_that_move_what_they_keep() -> None:
    variants = [Keeps() for _ in range(3)]
    separate = copy.deepcopy(variants)
    array = VariantArray(variants)
    for _ in range(6):
        x = torch.randn(2, 3)
        for out, module in zip(array(x), separate, strict=True):
            assert_same(out, module(x))
    for module, other in zip(variants, separate, strict=True):
        assert_same(
            [module.states, module.pair, module.table["scale"]], [other.states, other.pair, other.table["scale"]]
        )
        assert module.table["layer"] is module.layer
        assert module.pair[1] is module.states[-1] is module.table["last"]


def test_one_list_of_all_variants_is_not_written_for_one() -> None:
    everyones: list[int] = []
    array = VariantArray([Keeps(everyones) for _ in range(2)])
    with pytest.raises(FusionError, match="'shared', one object that all variants hold"):
        array(torch.randn(2, 3))
    assert not everyones
    assert [variant.states for variant in array.variants] == [[], []]


def test_collected_results_are_not_copied_at_every_forward() -> None:
    array = VariantArray([Collector() for _ in range(2)])
    array(torch.randn(2, 3))
    memory = array.variants[1].seen[0].data_ptr()
    for _ in range(3):
        array(torch.randn(2, 3))
    assert array.variants[1].seen[0].data_ptr() == memory
    assert len(array.variants[1].seen) == 4


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.seen.append(out.detach())
        return out
