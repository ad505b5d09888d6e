"""The rules for uneven workers, written down once more: one process, a worker after the other, in a recorded order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pl_pipe.comm.synchronizers import Event
from pl_pipe.grouping import Group, matchings

FEATURES = 5


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int, seed: int) -> Tensor:
    """Of a batch that only this worker has, in this step; the last of four is smaller."""
    draw = torch.Generator().manual_seed(10_000 * seed + 100 * rank + step)
    x = torch.randn(2 if step % 4 == 3 else 6, FEATURES, generator=draw, dtype=torch.float64)
    return F.cross_entropy(model(x), x[:, :3].argmax(1))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def put(model: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), model.parameters())


class Workers:
    """All workers' models and optimizers, side by side."""

    def __init__(self, count: int, seed: int) -> None:
        self.seed = seed
        self.models = [make_model(seed) for _ in range(count)]
        self.optimizers = [make_optimizer(model) for model in self.models]
        self.steps = [0] * count

    def gradient(self, rank: int) -> None:
        self.optimizers[rank].zero_grad()
        self.loss(rank).backward()

    def loss(self, rank: int) -> Tensor:
        return loss_of(self.models[rank], rank, self.steps[rank], self.seed)

    def update(self, rank: int) -> None:
        self.optimizers[rank].step()
        self.steps[rank] += 1

    def step(self, rank: int) -> None:
        self.gradient(rank)
        self.update(rank)

    def values(self) -> list[Tensor]:
        return [flat(model) for model in self.models]


def replay_groups(
    workers: Workers,
    groups: Sequence[Group],
    shares: Callable[[Group], Sequence[float]],
    *,
    steps: Sequence[int],
    every: int = 1,
) -> dict[int, list[Tensor]]:
    """Partial reduce: every member takes its steps, then all take the weighted mean; in the end each worker takes those
    that are left of its `steps`. Values after each step."""
    traces: dict[int, list[Tensor]] = {rank: [] for rank in range(len(workers.models))}

    def step(rank: int) -> None:
        workers.step(rank)
        traces[rank].append(flat(workers.models[rank]))

    for group in sorted(groups, key=lambda found: found.number):
        for rank in group.members:
            for _ in range(every):
                step(rank)
        mean = sum(share * flat(workers.models[rank]) for rank, share in zip(group.members, shares(group), strict=True))
        for rank in group.members:
            put(workers.models[rank], torch.as_tensor(mean))
            traces[rank][-1] = flat(workers.models[rank])
    for rank, count in enumerate(steps):
        assert 0 <= count - workers.steps[rank] < every
        while workers.steps[rank] < count:
            step(rank)
    return traces


def replay_matchings(workers: Workers, steps: int, seed: int, *, every: int = 1) -> list[Tensor]:
    pairs = matchings(range(len(workers.models)), seed=seed)
    for number in range(1, steps + 1):
        for rank in range(len(workers.models)):
            workers.step(rank)
        if number % every:
            continue
        partners = next(pairs)
        before = workers.values()
        for rank, partner in partners.items():
            put(workers.models[rank], (before[rank] + before[partner]) / 2)
    return workers.values()


def replay_sma(workers: Workers, steps: int, pull: float, *, every: int = 1) -> list[Tensor]:
    for number in range(1, steps + 1):
        before = workers.values()
        mean = sum(before) / len(before)
        for rank, own in enumerate(before):
            workers.gradient(rank)
            if number % every == 0:
                put(workers.models[rank], (1 - pull) * own + pull * mean)
            workers.update(rank)
    return workers.values()


def replay_waves(workers: Workers, waves: Sequence[int], steps: int) -> Tensor:
    """The server after workers handed in waves in this order, with a distance of 0: rounds of all workers."""
    count = len(workers.models)
    server = workers.values()[0]
    for start in range(0, len(waves), count):
        changes = []
        for rank in sorted(waves[start : start + count]):
            put(workers.models[rank], server)
            for _ in range(steps):
                workers.step(rank)
            changes.append((flat(workers.models[rank]) - server) / count)
        server = server + sum(changes)
    return server


def replay_events(workers: Workers, histories: Mapping[int, Sequence[Event]]) -> list[Tensor]:
    """AD-PSGD: x of each worker by its own events, in an order in which both sides of an averaging have been looked at
    before either takes it over."""
    x = workers.values()
    taken: dict[int, Tensor] = {}
    looks: dict[Any, Tensor] = {}
    places = dict.fromkeys(histories, 0)
    left = sum(map(len, histories.values()))
    while left:
        before = left
        for rank, history in histories.items():
            while places[rank] < len(history) and _play(workers, x, taken, looks, rank, history[places[rank]]):
                places[rank] += 1
                left -= 1
        assert left < before, f"events wait for each other at {places}"
    return x


def _play(
    workers: Workers, x: list[Tensor], taken: dict[int, Tensor], looks: dict[Any, Tensor], rank: int, event: Event
) -> bool:
    if event.kind == "load":
        taken[rank] = x[rank].clone()
    elif event.kind == "update":
        put(workers.models[rank], taken[rank])
        workers.step(rank)
        x[rank] = x[rank] + flat(workers.models[rank]) - taken[rank]
    else:
        other = event.partner
        which = (rank, other, event.number) if event.active else (other, rank, event.number)
        if event.kind == "look":
            looks[which, rank] = x[rank].clone()
        elif (which, other) not in looks:
            return False
        else:
            x[rank] = x[rank] + (looks[which, other] - looks[which, rank]) / 2
    return True
