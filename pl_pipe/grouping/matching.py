"""Pairs that all workers agree on without a word: equal seeds, equal shuffles. SD-Pipe's `--adpsgd`."""

from collections.abc import Iterator, Sequence
from random import Random

from pl_pipe.errors import ConfigError


def matchings(workers: Sequence[int], *, seed: int = 0) -> Iterator[dict[int, int]]:
    """Each worker's partner, step by step."""
    if len(workers) % 2:
        raise ConfigError(
            f"matching=true pairs all workers in every step, and there are {len(workers)}; take an even number, or "
            f"leave it out: without it any number will do"
        )
    random, order = Random(seed), list(workers)
    while True:
        random.shuffle(order)
        pairs = list(zip(order[::2], order[1::2], strict=True))
        yield dict(pairs) | {second: first for first, second in pairs}
