"""The same batches on every rank: loading draws from a random stream of its own.

Every rank of a pipeline loads each batch itself, and ranks draw differently while they compute (dropout on one stage
only), so a shuffle or an augmentation drawn from the process's generators would part them without a word. Here an
iterator is made, and each batch fetched, with a stream in place of those generators that nothing but loading draws
from: what starts equal stays equal, and the model's own numbers are untouched.

    strategy.process_dataloader ─► same_batches(loader, stream) ─► Lightning's loops

                      iter        next              next
    loading stream  ──█████───────█████─────────────█████───►   torch (CPU), numpy, random
    model's stream  ───────███████─────█████████████─────███►   training_step, dropout, ...
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import new_class
from typing import Any, SupportsIndex

from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe, MapDataPipe

from pl_pipe.errors import ConfigError
from pl_pipe.runtime.loader_generators import Broadcast, agree_on_generators
from pl_pipe.runtime.random_stream import RandomStream

Through = Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
"""Gives loops what they iterate, from what makes the loader's own iterator."""


class SharedLoading:
    """Marks a loader whose fetches draw from a stream of their own; `same_batches` makes them."""

    __slots__ = ()
    _shared_stream: RandomStream
    _shared_through: Through

    def __iter__(self) -> Iterator[Any]:
        # Lightning may make a new loader of this one's class; until that one has been through `same_batches` it has
        # no stream, and is the plain loader.
        stream = getattr(self, "_shared_stream", None)
        if stream is None:
            return self._plain_iter()
        return self._shared_through(partial(_Fetches, self._plain_iter, stream))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Classes made here have no place of their own to be found at."""
        marks = getattr(self, "_shared_stream", None), getattr(self, "_shared_through", None)
        original = getattr(self, "_shared_original", None)
        return _again, (original, None if original is not None else (type(self).__mro__[2], vars(self)), *marks)

    def _plain_iter(self) -> Iterator[Any]:
        _seed_workers_alike(self)
        fetches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
        return fetches


class _Fetches(Iterator[Any]):
    """Makes a loader's iterator and fetches from it, both inside the stream."""

    __slots__ = ("_fetches", "_stream")

    def __init__(self, make: Callable[[], Iterator[Any]], stream: RandomStream) -> None:
        self._stream = stream
        with stream:
            self._fetches = make()

    def __next__(self) -> Any:
        with self._stream:
            return next(self._fetches)


def _again(original: Any, parts: Any, stream: RandomStream | None, through: Through) -> Any:
    """A copy, from the loader that was marked, or from the class and attributes of one that Lightning made."""
    if original is None:
        base, attributes = parts
        original = object.__new__(base)
        vars(original).update(attributes)
    return original if stream is None else _marked(original, stream, through)


def _as_they_come(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    return make()


def same_batches(
    loader: Any,
    stream: RandomStream | int,
    *,
    broadcast: Broadcast | None = None,
    through: Through = _as_they_come,
) -> Any:
    """The loader, such that ranks that give equal streams (or seeds) fetch equal batches, whatever they draw elsewhere.

    Give a `RandomStream` where loaders are made anew while training (`reload_dataloaders_every_n_epochs`): with a seed
    each would begin alike. Generators that loader, samplers or data set hold themselves get the first rank's state
    through `broadcast`, so that the order they were seeded for is kept; without it they are seeded from the stream.
    What is fetched goes `through` what may look at it, or give something else instead.
    """
    if isinstance(loader, SharedLoading) and hasattr(loader, "_shared_stream"):
        object.__setattr__(loader, "_shared_through", through)
        return loader
    _refuse_different_parts(loader)
    stream = stream if isinstance(stream, RandomStream) else RandomStream(stream)
    agree_on_generators(loader, stream, broadcast)
    return _marked(loader, stream, through)


def _marked(loader: Any, stream: RandomStream, through: Through) -> Any:
    if isinstance(loader, DataLoader):
        return _sharing_twin(loader, stream, through)
    return (_SharedSized if hasattr(type(loader), "__len__") else _SharedIterable)(loader, stream, through)


def _refuse_different_parts(loader: Any) -> None:
    """Refuses what gives each rank another part of the data, or another order, by design."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ConfigError(
                f"{type(sampler).__name__} gives this rank part {sampler.rank} of {sampler.num_replicas} of the data, "
                "but the ranks of a pipeline need the same batches; leave it out, and set "
                "trainer.use_distributed_sampler=false if Lightning added it"
            )
    if isinstance(getattr(loader, "dataset", None), (IterDataPipe, MapDataPipe)):
        raise ConfigError(
            f"the data set is a {type(loader.dataset).__name__}, which torch divides among ranks, but the ranks of a "
            "pipeline need the same batches; make it a Dataset or an IterableDataset"
        )
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.in_order:
        raise ConfigError(
            f"the data loader has in_order=False and num_workers={loader.num_workers}, so its batches come as workers "
            "finish them, in another order on each rank; set in_order=True or num_workers=0"
        )


def _seed_workers_alike(loader: Any) -> None:
    """Lightning's `seed_everything(workers=True)` seeds workers by rank: all ranks take rank 0's.

    Lightning adds its function after the strategy has seen the loader, hence this is looked at with each iterator. The
    function is known by its name, for this layer does not import Lightning.
    """
    seeding: Any = getattr(loader, "worker_init_fn", None)
    function: Any = seeding.func if isinstance(seeding, partial) else seeding
    if getattr(function, "__name__", None) == "pl_worker_init_function":
        loader.worker_init_fn = partial(function, rank=0)


def _sharing_twin(loader: Any, stream: RandomStream, through: Through) -> Any:
    """A loader of a derived class that has all attributes in common with `loader`, by having the same `__dict__`.

    To Lightning and to user code it is the same kind of loader, and what is set on one is set on the other; yet the
    user's own loader, iterated elsewhere, draws as ever.
    """
    # Persistent workers that were started earlier were seeded by what each rank happened to draw: start new ones.
    loader._iterator = None
    if isinstance(loader, SharedLoading):  # of a class made here, but new: see SharedLoading.__iter__
        object.__setattr__(loader, "_shared_stream", stream)
        object.__setattr__(loader, "_shared_through", through)
        return loader
    twin: Any = object.__new__(_sharing_class(loader.__class__))
    own = {"_shared_stream": stream, "_shared_through": through, "_shared_original": loader}
    for name, value in {"__dict__": loader.__dict__, **own}.items():
        object.__setattr__(twin, name, value)  # a loader's own __setattr__ may refuse or record it
    return twin


@cache
def _sharing_class(base: type[Any]) -> type[Any]:
    """Under the base's name, which is what messages should show; the slots keep what is not in common."""
    body: dict[str, Any] = {"__slots__": ("_shared_original", "_shared_stream", "_shared_through")}
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if hasattr(base, "__del__"):
        body["__del__"] = lambda _: None  # the original, which the twin keeps alive, ends what they have in common
    return new_class(base.__name__, (SharedLoading, base), exec_body=lambda namespace: namespace.update(body))


class _SharedIterable(SharedLoading):
    """Stands for an iterable that is no DataLoader: everything but iteration is the iterable's."""

    def __init__(self, loader: Iterable[Any], stream: RandomStream, through: Through) -> None:
        own = {"_shared_stream": stream, "_shared_through": through, "_shared_original": loader}
        # Lightning finds out whether a loader is stateful by looking, from Python 3.12 on without __getattr__.
        own |= {name: getattr(loader, name) for name in ("state_dict", "load_state_dict") if hasattr(loader, name)}
        self.__dict__.update(own)

    def _plain_iter(self) -> Iterator[Any]:
        _seed_workers_alike(self._shared_original)
        return iter(self._shared_original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_shared_"):
            raise AttributeError(name)  # a copy in the making has no original yet
        return getattr(self._shared_original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._shared_original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._shared_original, name)


class _SharedSized(_SharedIterable):
    """Stands for an iterable that has a length, or says itself that it has none."""

    def __len__(self) -> int:
        return len(self._shared_original)
