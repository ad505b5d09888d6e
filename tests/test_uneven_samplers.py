"""Batches for workers of different speed: every one is trained on once."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from pl_pipe.comm.coordination.tickets import LocalTickets
from pl_pipe.runtime.uneven_samplers import SharedSampler, TicketedSampler, epoch_order


def samplers(
    workers: int, samples: int, *, batch_size: int = 4, drop_last: bool = False, limit: int | float = 1.0
) -> list[TicketedSampler]:
    tickets = LocalTickets()
    return [
        TicketedSampler(
            lambda epoch: [(sample + epoch) % samples for sample in range(samples)],
            samples=samples, batch_size=batch_size, drop_last=drop_last, limit=limit, place=place, workers=workers,
            tickets=tickets, epoch=lambda: 0,
        )
        for place in range(workers)
    ]  # fmt: skip


@given(
    st.integers(1, 5), st.integers(1, 60), st.booleans(), st.lists(st.integers(0, 4), max_size=60), st.integers(1, 3)
)
def test_every_batch_once_whatever_the_speeds(
    workers: int, samples: int, drop_last: bool, turns: list[int], epochs: int
) -> None:
    made = samplers(workers, samples, drop_last=drop_last)
    loaders = [DataLoader(TensorDataset(torch.arange(samples)), 4, sampler=one, drop_last=drop_last) for one in made]
    batches = samples // 4 if drop_last else -(-samples // 4)
    for _ in range(epochs):
        running = {place: iter(loader) for place, loader in enumerate(loaders)}
        seen: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for place in [*turns, *range(workers), *sorted([*range(workers)] * (batches + 1))]:
            if place in running:
                try:
                    (values,) = next(running[place])
                except StopIteration:
                    del running[place]
                    continue
                taken[place] += 1
                seen.update(values.tolist())
        assert not running
        assert set(seen) == set(range(batches * 4 if drop_last else samples))
        if batches >= workers:
            assert set(seen.values()) <= {1}
        assert all(taken[place] >= 1 for place in range(workers)) or not batches


@pytest.mark.parametrize(("limit", "batches", "share"), [(1.0, 13, 5), (0.5, 6, 2), (2, 6, 2), (9, 13, 5)])
def test_limits_count_batches_a_worker(limit: int | float, batches: int, share: int) -> None:
    made = samplers(3, 50, limit=limit)
    assert (made[0].batches, made[0].share) == (batches, share)
    found = sorted(sample for one in made for sample in one)
    assert found == list(range(min(50, batches * 4)))


def test_a_stop_ends_the_epoch_for_all_and_the_next_begins_anew() -> None:
    first, second = samplers(2, 40)
    running = iter(first)
    assert [next(running) for _ in range(8)] == [0, 1, 2, 3, 8, 9, 10, 11]
    later = iter(second)
    next(later)
    second.stop()
    assert list(later) == [5, 6, 7]
    assert list(running) == []
    assert len(list(first)) + len(list(second)) == 40


def test_the_order_is_the_loaders() -> None:
    data = list(range(20))
    told: list[list[int]] = []

    def first_workers(draw: object) -> list[int]:
        told.append(draw())  # type: ignore[operator]
        return [7, 7]

    shuffled = epoch_order(RandomSampler(data), 20, seed=3, first_workers=first_workers)
    assert shuffled(0) == shuffled(0) != shuffled(1)
    assert sorted(shuffled(1)) == data
    assert list(epoch_order(SequentialSampler(data), 20, seed=3, first_workers=first_workers)(5)) == data
    own = epoch_order(RandomSampler(data, replacement=True), 20, seed=3, first_workers=first_workers)
    assert list(own(0)) == [7, 7]
    assert len(told[0]) == 20


@given(st.integers(1, 6), st.integers(1, 30))
def test_evaluation_is_shared_without_repetition(workers: int, samples: int) -> None:
    living = [workers]
    shares = [SharedSampler(range(samples), shares=lambda place=place: (place, living[0])) for place in range(workers)]
    for living[0] in range(workers, 0, -1):
        parts = [list(share) for share in shares[: living[0]]]
        assert [len(share) for share in shares[: living[0]]] == [len(part) for part in parts]
        assert all(parts)
        found = [sample for part in parts for sample in part]
        assert set(found) == set(range(samples))
        assert len(found) == max(samples, living[0])
