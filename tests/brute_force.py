"""The partition problem by exhaustion, written from the cost models' statements alone: the planner's oracle."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pl_pipe.cluster import Cluster, Level
from pl_pipe.graph import LayerGraph


@dataclass(frozen=True)
class Question:
    graph: LayerGraph
    cluster: Cluster
    cost_model: str
    ratio: float | None
    straight: bool = False
    use_fewer: bool = False
    memory_bytes: float | None = None
    optimizer_state_factor: float = 2.0


Cut = frozenset[str]


def cuts(graph: LayerGraph) -> list[Cut]:
    names = [node.name for node in graph.nodes]
    found = []
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            if all(source in chosen for source, target in graph.edges if target in chosen):
                found.append(frozenset(chosen))
    return found


def crossing_bytes(graph: LayerGraph, cut: Cut) -> float:
    sources = {source for source, target in graph.edges if source in cut and target not in cut}
    return sum(graph.by_name[name].total_output_bytes for name in sources)


def stage_s(
    question: Question, level: Level, inner: int, compute_s: float, a: Cut, b: Cut, r: int, first: bool
) -> float:
    """One stage on r members of a level whose groups need `compute_s` for the layers in b but not in a."""
    graph = question.graph
    layers = [graph.by_name[name] for name in b - a]
    parameters = sum(layer.parameter_bytes for layer in layers)
    before, behind = crossing_bytes(graph, a), crossing_bytes(graph, b)
    speed = level.bandwidth
    if question.cost_model == "pipedream":
        reduce_s = 4 * (r - 1) * parameters / (r * speed)
        if first:
            return (compute_s + reduce_s / inner) / r
        prices = [(compute_s + reduce_s) / r]
        if question.ratio is not None:
            prices += [2 * size / (speed * r * question.ratio) for size in (before, behind)]
        return max(prices)
    plain = sum(layer.compute_s for layer in layers)
    forward = sum(layer.forward_s for layer in layers) / plain if plain else 0.0
    reduce_s = level.all_reduce_factor * (r - 1) / r * parameters / speed
    traffic_s = (behind if first else before + behind) / (speed * (question.ratio or 1.0))
    return max(compute_s, compute_s * forward + reduce_s, traffic_s + reduce_s) / r


def fits(question: Question, a: Cut, b: Cut, r: int, behind: int) -> bool:
    if question.memory_bytes is None:
        return True
    layers = [question.graph.by_name[name] for name in b - a]
    parameters = sum(layer.parameter_bytes for layer in layers)
    waiting = math.ceil(behind / r)
    if question.cost_model == "pipedream":
        return waiting * (parameters + sum(layer.total_output_bytes for layer in layers)) <= question.memory_bytes
    kept = sum(layer.kept_bytes for layer in layers) + crossing_bytes(question.graph, a)
    fixed = (1 + question.optimizer_state_factor) * parameters
    return (waiting + 1) * (parameters + kept) + fixed <= question.memory_bytes


def chains(all_cuts: list[Cut], a: Cut, b: Cut) -> Iterator[list[Cut]]:
    """All ways from cut a to cut b over cuts in between."""
    yield [a, b]
    for middle in all_cuts:
        if a < middle < b:
            for rest in chains(all_cuts, middle, b):
                yield [a, *rest]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, total)))


def best_s(question: Question) -> float:
    """The least time between mini-batches over all splits and replications, level by level; inf if none is allowed."""
    all_cuts = cuts(question.graph)
    known: dict[tuple[int, Cut, Cut], float] = {}

    def solve(level: int, a: Cut, b: Cut) -> float:
        if level < 0:
            return sum(question.graph.by_name[name].compute_s for name in b - a)
        if (level, a, b) in known:
            return known[level, a, b]
        link = question.cluster.levels[level]
        inner = question.cluster.levels[level - 1].members if level else 1
        best = math.inf
        for way in chains(all_cuts, a, b):
            stages = list(itertools.pairwise(way))
            sizes = range(len(stages), link.members + 1) if question.use_fewer else [link.members]
            for size in sizes:
                if size < len(stages):
                    continue
                for replicas in compositions(size, len(stages)):
                    if question.straight and any(count > 1 for count in replicas):
                        continue
                    price = 0.0
                    for index, ((start, end), count) in enumerate(zip(stages, replicas, strict=True)):
                        behind = size - sum(replicas[: index + 1])  # idle members keep nothing waiting
                        if not fits(question, start, end, count, behind):
                            price = math.inf
                            break
                        compute_s = solve(level - 1, start, end)
                        price = max(price, stage_s(question, link, inner, compute_s, start, end, count, index == 0))
                    best = min(best, price)
        known[level, a, b] = best
        return best

    return solve(len(question.cluster.levels) - 1, frozenset(), frozenset(node.name for node in question.graph.nodes))
