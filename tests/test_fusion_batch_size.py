"""A variant's batch size reaches whatever makes the batches, or is refused."""

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, loader, trainer

SIZES = [{"batch_size": 4}, {"batch_size": 13}]


def batches(size: int) -> DataLoader[Any]:
    data = loader().dataset
    assert isinstance(data, TensorDataset)
    return DataLoader(data, batch_size=size)


class Sized(Classifier):
    """Knows the batch size as a hyper-parameter of its own."""

    def __init__(self, lr: float = 0.1, batch_size: int = 26) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters("lr", "batch_size")


class Loading(Sized):
    """Makes its own batches, of data that it has once `setup` was called."""

    def setup(self, stage: str) -> None:
        self.size = self.hparams["batch_size"]

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(self.size)


class Attribute(L.LightningDataModule):
    def __init__(self, batch_size: int = 26) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(self.batch_size)


class OfItsClass(L.LightningDataModule):
    batch_size = 26

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class Property(OfItsClass):
    def __init__(self) -> None:
        super().__init__()
        self.size = 26

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.size = size


class OfHyperParameters(OfItsClass):
    def __init__(self, batch_size: int = 26) -> None:
        super().__init__()
        self.save_hyperparameters()

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return int(self.hparams["batch_size"])


class Fixed(OfItsClass):
    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return 26


class Stubborn(Property):
    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return min(self.size, 8)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.size = size


def steps(fused: FusionStrategy) -> list[int]:
    return [row.steps for row in sorted(fused.leaderboard.rows, key=lambda row: row.number)]


@pytest.mark.parametrize("module", [Classifier, Sized])
@pytest.mark.parametrize("data", [Attribute, OfItsClass, Property, OfHyperParameters])
def test_data_modules_have_each_variants_batch_size(module: Any, data: Any) -> None:
    fused, given = FusionStrategy(SIZES), data()
    before = dict(vars(given))
    trainer(strategy=fused, max_epochs=1).fit(module(), datamodule=given)
    assert steps(fused) == [7, 2]
    assert given.batch_size == 26
    assert vars(given).keys() >= before.keys()
    assert ("batch_size" in vars(given)) == ("batch_size" in before)


def test_a_model_that_makes_its_own_batches_makes_each_variants() -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([*SIZES, {"batch_size": 13, "lr": 0.2}])
    trainer(strategy=fused, max_epochs=1).fit(Loading())
    assert steps(fused) == [7, 2, 2]
    L.seed_everything(1, verbose=False)
    alone = Loading(lr=0.2, batch_size=13)
    trainer(max_epochs=1).fit(alone)
    assert difference(alone, fused.variants[2]) <= 1e-9


def test_a_factorys_model_makes_each_variants_too() -> None:
    fused = FusionStrategy(SIZES, factory=lambda batch_size: Loading(batch_size=batch_size))
    trainer(strategy=fused, max_epochs=1).fit(Loading())
    assert steps(fused) == [7, 2]


@pytest.mark.parametrize("data", [Fixed, Stubborn])
def test_a_batch_size_that_cannot_be_set_is_refused(data: Any) -> None:
    given = data()
    with pytest.raises(ConfigError, match=r"batch_size=(4|13), and the data module \w+ stays at (26|8).*can be set"):
        trainer(strategy=FusionStrategy(SIZES), max_epochs=1).fit(Sized(), datamodule=given)
    assert getattr(given, "size", 26) == 26
    fused = FusionStrategy(SIZES)
    running = trainer(strategy=fused, max_epochs=1)
    running.fit(Classifier(), datamodule=Attribute())
    (tested,) = running.test(running.lightning_module, datamodule=given, verbose=False)  # whatever its batch size
    assert len(tested) == 2


def test_given_loaders_are_refused_unless_they_have_it() -> None:
    fused = FusionStrategy(SIZES)
    with pytest.raises(ConfigError, match=r"variant 1 sets batch_size=13.*given data loader"):
        trainer(strategy=fused).fit(Sized(), loader())
    assert steps(fused) == [0, 0]  # before any is trained
    fused = FusionStrategy([{"batch_size": 4, "lr": 0.1}, {"batch_size": 4, "lr": 0.2}])
    trainer(strategy=fused, max_epochs=1).fit(Sized(), loader())
    assert steps(fused) == [7, 7]
