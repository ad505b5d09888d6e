"""Ranks that draw differently fetch the same batches, and loading leaves the model's random numbers alone.

rank 0   load ── dropout ── load ──────────── load        two wrapped loaders in one process, with other draws
rank 1   load ──────────── load ── 3 draws ── load        between their fetches, stand for the two ranks
"""

import copy
import inspect
import json
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from pl_pipe.errors import ConfigError
from pl_pipe.runtime.random_stream import RandomStream
from pl_pipe.runtime.shared_loading import same_batches

SEED = 7


class Augmented(Dataset[Tensor]):
    """Index, and a number of each generator; numpy makes normals in pairs, so that one may be left over."""

    def __init__(self, length: int = 12, fails_at: int | None = None) -> None:
        self.length, self.fails_at = length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.tensor([index, torch.rand(()).item(), np.random.randn(), random.random()], dtype=torch.double)
        if index == self.fails_at:
            raise OSError(f"sample {index} is damaged")
        return drawn


class Stream(IterableDataset[Tensor]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number, torch.rand(()).item()]) for number in torch.randperm(8).tolist())


def draw() -> list[float]:
    """What the model would draw next: one number of each generator."""
    return [torch.rand(()).item(), np.random.randn(), random.random()]


def seed_model(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def epochs_of_rank(rank: int, loader: Iterable[Any], epochs: int = 2) -> list[list[Any]]:
    """All batches of some epochs, with the draws of a model that drops out more on later ranks."""
    seed_model(1000 + rank)
    seen: list[list[Any]] = []
    for _ in range(epochs):
        seen.append([])
        for batch in loader:
            seen[-1].append(batch)
            for _ in range(rank):
                draw()
    return seen


def equal(left: Any, right: Any) -> bool:
    return json.dumps(left, default=Tensor.tolist) == json.dumps(right, default=Tensor.tolist)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, **options)


def batch_sampled() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(9)), 2, drop_last=True))


def unbatched() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=None, sampler=RandomSampler(range(12), replacement=True, num_samples=5))


def streamed() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=3)


class Restless:
    """A loader that is no DataLoader, drawing when an iterator is made and with each batch."""

    def __iter__(self) -> Iterator[list[float]]:
        first = np.random.permutation(5).tolist()
        return (first + draw() for _ in range(3))


class Endless(DataLoader[Any]):
    """A DataLoader that is its own iterator, as endless ones are written."""

    def __iter__(self) -> Any:
        self.inner, self.left = super().__iter__(), 5
        return self

    def __next__(self) -> Any:
        self.left -= 1
        if not self.left:
            raise StopIteration
        try:
            return next(self.inner)
        except StopIteration:
            self.inner = super().__iter__()
            return next(self.inner)


def endless() -> DataLoader[Any]:
    return Endless(Augmented(), batch_size=4, shuffle=True)


LOADERS: list[Callable[[], Iterable[Any]]] = [shuffled, batch_sampled, unbatched, streamed, Restless, endless]


@pytest.mark.parametrize("make", LOADERS)
def test_ranks_fetch_the_same_batches_whatever_they_draw_meanwhile(make: Callable[[], Any]) -> None:
    first, second = (epochs_of_rank(rank, same_batches(make(), SEED)) for rank in (0, 1))
    assert equal(first, second)
    assert not equal(*first), "a second epoch goes on in the stream: another order, other augmentations"
    assert not equal(first, epochs_of_rank(0, same_batches(make(), SEED + 1)))
    assert not equal(*(epochs_of_rank(rank, make()) for rank in (0, 1))), "this test could not fail"


@pytest.mark.parametrize("make", LOADERS)
def test_loading_leaves_the_models_stream_alone(make: Callable[[], Any]) -> None:
    seed_model(3)
    np.random.randn()  # numpy now holds the second normal of a pair
    expected = [draw() for _ in range(4)]
    seed_model(3)
    np.random.randn()
    drawn = [draw() for _ in zip(range(4), same_batches(make(), SEED), strict=False)]
    assert drawn == expected[: len(drawn)]
    assert len(drawn) >= 2


def test_a_stream_taken_from_the_process_gives_the_batches_of_a_plain_run() -> None:
    """A model that draws nothing shuffles and augments as without pl-pipe; ranks may take the first rank's stream."""
    seed_model(5)
    np.random.randn()
    plain = [list(shuffled()), list(streamed()), list(shuffled())]
    seed_model(5)
    np.random.randn()
    stream = pickle.loads(pickle.dumps(RandomStream.current()))
    seed_model(6)
    shared = [list(same_batches(make(), stream)) for make in (shuffled, streamed, shuffled)]
    assert equal(plain, shared)


def test_a_stream_held_across_loaders_does_not_shuffle_each_new_one_alike() -> None:
    """What `reload_dataloaders_every_n_epochs` needs; a plain seed would begin anew."""
    stream = RandomStream(SEED)
    assert not equal(list(same_batches(shuffled(), stream)), list(same_batches(shuffled(), stream)))
    assert equal(list(same_batches(shuffled(), SEED)), list(same_batches(shuffled(), SEED)))


def test_a_loader_inside_a_loader_may_use_the_same_stream() -> None:
    stream = RandomStream(SEED)
    inner = same_batches(shuffled(), stream)
    seed_model(3)
    expected = draw()
    seed_model(3)
    assert len(list(same_batches(SimpleIterable(inner), stream))) == 3
    assert draw() == expected


class SimpleIterable:
    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def test_a_failing_data_set_gives_the_model_its_stream_back() -> None:
    seed_model(3)
    expected = draw()
    seed_model(3)
    with pytest.raises(OSError, match="sample 5 is damaged"):
        list(same_batches(DataLoader(Augmented(fails_at=5), shuffle=True), SEED))
    assert draw() == expected
    with pytest.raises(TypeError, match="not iterable"):
        iter(same_batches(5, SEED))


@pytest.mark.parametrize("by_lightning", [False, True])
def test_worker_processes_draw_the_same_on_every_rank(by_lightning: bool) -> None:
    """Also where Lightning's `seed_everything(workers=True)` adds, after the strategy, a seeding of workers by rank."""
    seen = []
    for rank in (0, 1):
        plain = shuffled(num_workers=2, persistent_workers=by_lightning)
        seed_model(rank)
        next(iter(plain))  # workers whose seeds the rank drew itself
        loader = same_batches(plain, SEED)
        if by_lightning:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        seen.append(epochs_of_rank(rank, loader))
        plain._iterator = loader._iterator = None  # ends the workers
    assert equal(*seen)
    assert not equal(*seen[0])
    assert sorted(torch.cat(seen[0][0])[:, 0].tolist()) == list(range(12))


@pytest.mark.parametrize("given", [pl_worker_init_function, partial(pl_worker_init_function, rank=3), None, print])
def test_lightnings_worker_seeding_is_rank_zeros_and_others_are_kept(given: Any) -> None:
    loader = same_batches(shuffled(worker_init_fn=given), SEED)
    iter(loader)
    expected = given if given in (None, print) else partial(pl_worker_init_function, rank=0)
    assert str(loader.worker_init_fn) == str(expected)
    thing = same_batches(SimpleIterable([1]), SEED)
    thing.worker_init_fn = given
    iter(thing)
    assert str(thing.worker_init_fn) == str(expected)


class OwnGenerators(Augmented):
    """A data set with generators of its own, one hidden in a transform."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.numpy = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)
        self.transforms = [SimpleNamespace(python=random.Random(seed))]
        self.torch = torch.Generator()
        self.torch.seed() if seed is None else self.torch.manual_seed(seed)
        self.of_the_process = (np.random.mtrand._rand, torch.default_generator, random.SystemRandom(), np, Augmented)

    def __getitem__(self, index: int) -> Tensor:
        own = [self.numpy.random(), self.legacy.randn(), self.transforms[0].python.random()]
        return torch.cat([super().__getitem__(index), torch.tensor(own), torch.rand(1, generator=self.torch)])


def own_generators(seed: int | None) -> DataLoader[Any]:
    order = torch.Generator()
    order.seed() if seed is None else order.manual_seed(seed)
    return DataLoader(OwnGenerators(seed), batch_size=4, shuffle=True, generator=order)


def test_generators_of_loader_and_data_set_are_seeded_from_the_stream() -> None:
    first, second = (epochs_of_rank(rank, same_batches(own_generators(None), SEED)) for rank in (0, 1))
    assert equal(first, second)
    assert not equal(*first)


@pytest.mark.parametrize("seed", [None, 11])
def test_generators_of_loader_and_data_set_follow_the_first_ranks(seed: int | None) -> None:
    """So that an order the user seeded stays the order of a plain run."""
    told: list[Any] = []

    def broadcast(value: Any) -> Any:
        told.append(pickle.dumps(value))  # as it would travel
        return pickle.loads(told[0])

    loaders, drawn = [], []
    for rank in (0, 1):
        seed_model(rank)
        loaders.append(same_batches(own_generators(seed), SEED, broadcast=broadcast))
        drawn.append(draw())
    for rank in (0, 1):
        seed_model(rank)
        assert drawn[rank] == draw(), "the process's generators are the model's"
    first, second = (epochs_of_rank(rank, loader) for rank, loader in enumerate(loaders))
    assert equal(first, second)
    if seed is not None:
        plain = epochs_of_rank(0, own_generators(seed))
        own = [[batch[:, (0, 4, 5, 6, 7)] for batch in epoch] for epoch in plain]
        assert equal(own, [[batch[:, (0, 4, 5, 6, 7)] for batch in epoch] for epoch in first])


def test_the_search_for_generators_stays_near_the_loader() -> None:
    """A data set may hold millions of samples, and through a module or a chain of objects all of the program."""
    data = Augmented()
    chain = SimpleNamespace(end=random.Random())
    for _ in range(2000):
        chain = SimpleNamespace(next=chain)
    module = ModuleType("elsewhere")
    module.generator = random.Random()  # type: ignore[attr-defined]
    data.samples = [random.Random() for _ in range(65)]  # type: ignore[attr-defined]
    data.far = {"chain": chain, "module": module, "near": random.Random()}  # type: ignore[attr-defined]
    told: list[Any] = []
    same_batches(DataLoader(data), SEED, broadcast=lambda value: told.append(value) or value)
    assert [kinds for kinds, _ in told] == [["Random"]]


def test_ranks_with_other_generators_are_refused() -> None:
    def broadcast(value: Any) -> Any:
        return (["Generator"], [torch.Generator().get_state()])

    with pytest.raises(ConfigError, match=r"holds the random generators \[\], the first rank's \['Generator'\], but"):
        same_batches(shuffled(), SEED, broadcast=broadcast)


def test_what_parts_the_ranks_by_design_is_refused() -> None:
    data = Augmented()
    part = DistributedSampler(data, num_replicas=4, rank=2)
    for loader in (DataLoader(data, sampler=part), DataLoader(data, batch_sampler=BatchSampler(part, 2, False))):
        with pytest.raises(ConfigError, match=r"DistributedSampler gives this rank part 2 of 4 .* leave it out"):
            same_batches(loader, SEED)
    assert len(list(same_batches(DataLoader(data, sampler=DistributedSampler(data, 1, 0)), SEED))) == 12
    with pytest.raises(ConfigError, match=r"in_order=False and num_workers=2.* set in_order=True or num_workers=0"):
        same_batches(shuffled(num_workers=2, in_order=False), SEED)
    same_batches(shuffled(in_order=False), SEED)  # of no effect without workers
    with pytest.raises(ConfigError, match=r"which torch divides among ranks.*make it a Dataset"):
        same_batches(DataLoader(IterableWrapper(range(3))), SEED)


def test_lengths_are_the_loaders() -> None:
    assert len(same_batches(shuffled(), SEED)) == 3
    assert len(same_batches(range(4), SEED)) == 4
    for loader in (streamed(), Restless(), iter([1])):
        with pytest.raises(TypeError, match="has no len"):
            len(same_batches(loader, SEED))
    assert same_batches(Restless(), SEED), "what has no length is true"


def test_wrapping_twice_is_wrapping_once() -> None:
    for once in (same_batches(shuffled(), SEED), same_batches(Restless(), SEED)):
        assert same_batches(once, SEED + 1) is once


def test_a_wrapped_loader_is_the_loader_but_for_its_iterations() -> None:
    loader = shuffled(drop_last=True)
    shared = same_batches(loader, SEED)
    assert isinstance(shared, DataLoader)
    assert type(shared).__name__ == "DataLoader"
    assert (shared.dataset, shared.batch_sampler, shared.num_workers) == (loader.dataset, loader.batch_sampler, 0)
    shared.collate_fn = len
    assert loader.collate_fn is len
    assert list(shared) == [4, 4, 4]
    shared.collate_fn = torch.stack
    assert equal(epochs_of_rank(0, loader), epochs_of_rank(0, shuffled())), "the user's own loader draws as ever"
    assert equal(*(epochs_of_rank(0, loader) for loader in (shuffled(), type(shared)(Augmented(), 4, shuffle=True))))
    other = copy.deepcopy(shared)
    assert equal(list(other), list(shared))
    thing = same_batches(SimpleIterable([1, 2]), SEED)
    thing.inner = [3]
    assert list(copy.copy(thing)) == [3]
    del thing.inner
    with pytest.raises(AttributeError, match="inner"):
        _ = thing.inner


class Closing(DataLoader[Any]):
    """A loader that ends something when it is collected."""

    closed = 0

    def __del__(self) -> None:
        Closing.closed += 1


def test_a_loader_with_a_finalizer_ends_once_and_not_before_its_twin() -> None:
    shared = same_batches(Closing([1, 2]), SEED)
    assert Closing.closed == 0
    assert len(list(shared)) == 2
    del shared
    assert Closing.closed == 1


class OneDevice(SingleDeviceStrategy):
    """A strategy that shares its loading and nothing else."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.stream = RandomStream(SEED)

    def process_dataloader(self, dataloader: Any) -> Any:
        return same_batches(dataloader, self.stream, broadcast=self.broadcast)


class Model(L.LightningModule):
    """Keeps what it was given; draws as a later stage would."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.layer = rank, torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(("train", batch))
        for _ in range(self.rank):
            draw()
        return self.layer(torch.ones(4)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((f"val {dataloader_idx}", batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[:, 0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=OneDevice(), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def fit(rank: int, loaders: Callable[[], Any], validation: Callable[[], Any], **options: Any) -> list[Any]:
    seed_model(1000 + rank)
    model = Model(rank)
    trainer(max_epochs=2, num_sanity_val_steps=1, **options).fit(model, loaders(), validation())
    return model.seen


def several() -> CombinedLoader:
    return CombinedLoader({"a": shuffled(), "b": [streamed(), Restless()]}, "max_size_cycle")


@pytest.mark.parametrize("loaders", [shuffled, streamed, several, Restless])
def test_a_fit_sees_the_same_batches_on_ranks_that_draw_differently(loaders: Callable[[], Any]) -> None:
    def validation() -> list[Any]:
        return [DataLoader(Augmented(4), batch_size=2, sampler=RandomSampler(range(4))), streamed()]

    first, second = (fit(rank, loaders, validation, limit_train_batches=3) for rank in (0, 1))
    assert equal(first, second)
    steps = [name for name, _ in first]
    epoch = ["train"] * 3 + ["val 0"] * 2 + ["val 1"] * 3
    assert steps == ["val 0", "val 1", *epoch, *epoch]
    assert not equal(first[2:10], first[10:]), "the epochs differ"


def test_overfitting_a_combined_loader_twice_finds_it_wrapped() -> None:
    """Lightning leaves the wrapped loaders in a user's CombinedLoader, and makes new ones of their class."""
    loaders = several()
    seed_model(1)
    for _ in range(2):
        model = Model(0)
        trainer(max_epochs=1, overfit_batches=2).fit(model, loaders)
        assert equal(model.seen[0][1]["a"][:, 0].tolist(), [0.0, 1.0, 2.0, 3.0])


class Counting(SimpleIterable):
    """A loader that Lightning keeps in checkpoints."""

    def __init__(self) -> None:
        super().__init__([1, 2, 3])
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_stateful_loaders_stay_stateful() -> None:
    counting = Counting()
    assert inspect.getattr_static(same_batches(counting, SEED), "state_dict")() == {"at": 2}  # Python 3.12 looks so
    combined = CombinedLoader([same_batches(counting, SEED), same_batches(Restless(), SEED)])
    assert combined._state_dicts() == [{"at": 2}]
    combined._load_state_dicts([{"at": 1}])
    assert counting.loaded == {"at": 1}


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((prediction.tolist(), indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = indices


def test_predictions_know_their_samples() -> None:
    writer = Writer()
    predicting = trainer(callbacks=[writer])
    out = predicting.predict(Model(0), shuffled(), return_predictions=True)
    assert isinstance(predicting.predict_loop._combined_loader.flattened[0], DataLoader)
    assert [batch.tolist() for batch in out] == [indices for _, indices in writer.batches]
    assert writer.epoch == [[indices for _, indices in writer.batches]]
    assert all(predicted == indices for predicted, indices in writer.batches)
    assert writer.epoch[0] != [list(range(4)), list(range(4, 8)), list(range(8, 12))], "it was shuffled"
