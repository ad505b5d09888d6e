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

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace, new_class
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe, MapDataPipe

from pl_pipe.errors import ConfigError

Through = Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
"""Gives loops what they iterate, from what makes the loader's own iterator."""
Broadcast = Callable[[Any], Any]
"""Gives every rank of a pipeline the object that its first rank passed, as Lightning's `Strategy.broadcast` does."""


class RandomStream:
    """A state of torch's CPU generator, numpy's global one and `random`'s: inside `with stream:` it is the process's.

    The stream continues where the last `with` left it. One stream may serve several loaders, provided that every rank
    iterates all of them in the same order; it can be pickled, so that ranks may start from one rank's.
    """

    def __init__(self, seed: int) -> None:
        seed %= 2**64
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)
        self._pending: dict[str, Any] = {**_NO_BITS, "has_gauss": 0, "gauss": 0.0}
        self._depth = 0  # a loader inside a loader may enter the stream it is already in

    @classmethod
    def current(cls) -> "RandomStream":
        """Starts as the process's generators stand now: a model that draws nothing then gets a plain run's batches."""
        stream = cls(0)
        stream._torch = torch.default_generator.get_state()
        stream._python = random.getstate()
        state = np.random.get_state(legacy=False)
        stream._numpy = type(mtrand.get_bit_generator())()
        stream._numpy.state = state
        stream._pending = {**_NO_BITS, "has_gauss": state["has_gauss"], "gauss": state["gauss"]}
        return stream

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._exchange()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._exchange()

    def become_current(self) -> None:
        """The process's generators go on as this stream; it is not to be used afterwards."""
        self._exchange()

    def _exchange(self) -> None:
        """The process's states become the stream's and the other way round; this runs twice a batch, so it is quick."""
        default = torch.default_generator
        now = default.get_state()
        default.set_state(self._torch)
        self._torch = now
        state = random.getstate()
        random.setstate(self._python)
        self._python = state
        # numpy copies a state in 75 us, but changes its global generator in 1 us. That forgets the second normal number
        # of a pair, which the one before it left behind; so the pair's rest is carried over apart.
        bits, pending = mtrand.get_bit_generator(), _pending_normal()
        mtrand.set_bit_generator(self._numpy)
        if self._pending["has_gauss"]:
            _pending_normal(self._pending)
        self._numpy, self._pending = bits, pending


_NO_BITS = {"bit_generator": "none", "state": {}}


def _pending_normal(new: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads, and with `new` replaces, what numpy's global generator keeps besides its bits, leaving the bits alone."""
    rand = mtrand._rand
    bits = rand._bit_generator
    rand._bit_generator = SimpleNamespace(state=dict(_NO_BITS))  # type: ignore[assignment]
    try:
        old = rand.get_state(legacy=False)
        if new is not None:
            rand.set_state(new)
        return old
    finally:
        rand._bit_generator = bits


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
    _agree_on_generators(loader, stream, broadcast)
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


_Private = torch.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
_LOOKED_AT = 1000  # objects; a data set may hold millions, and generators lie near the top
_LONG = 64  # items; a longer list holds samples


def _agree_on_generators(loader: Any, stream: RandomStream, broadcast: Broadcast | None) -> None:
    """Gives the generators that a loader holds equal states on all ranks: the first rank's, or seeds of the stream."""
    found = list(_private_generators(loader))
    if broadcast is None:
        with stream:
            for generator in found:
                _seed(generator, random.getrandbits(32))
        return
    kinds = [type(generator).__name__ for generator in found]
    first_kinds, states = broadcast((kinds, [_state(generator) for generator in found]))
    if kinds != first_kinds:
        raise ConfigError(
            f"this rank's data loader holds the random generators {kinds}, the first rank's {first_kinds}, but the "
            "ranks of a pipeline need the same batches; make the loader and its data set alike on every rank"
        )
    for generator, state in zip(found, states, strict=True):
        _set_state(generator, state)


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """The generators that a loader holds stand afterwards as they did before."""
    before = [(generator, _state(generator)) for generator in _private_generators(loader)]
    try:
        yield
    finally:
        for generator, state in before:
            _set_state(generator, state)


def _private_generators(loader: Any) -> Iterator[_Private]:
    """Generators among the attributes of a loader, its samplers, data set, transforms: nearest first, each once."""
    of_the_process = (torch.default_generator, mtrand._rand, random.random.__self__)  # type: ignore[attr-defined]
    seen = {id(generator) for generator in of_the_process}
    queue = deque([loader])
    while queue and len(seen) < _LOOKED_AT:
        item = queue.popleft()
        if isinstance(item, np.random.Generator):
            item = item.bit_generator
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, MethodType)):
            continue
        if isinstance(item, _Private) and not isinstance(item, random.SystemRandom):  # that one has no state
            yield item
        elif isinstance(item, (list, tuple, dict)):
            if len(item) <= _LONG:
                queue.extend(item.values() if isinstance(item, dict) else item)
        elif hasattr(item, "__dict__"):
            queue.extend(vars(item).values())
        else:
            continue
        seen.add(id(item))


def _state(generator: _Private) -> Any:
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: _Private, state: Any) -> None:
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: _Private, seed: int) -> None:
    if isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)
