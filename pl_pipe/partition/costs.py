"""What a stage costs per mini-batch, under two models. cuts, cluster -> *costs* -> tables.

Every price is the largest of a few terms of one form: with r replicas, each of which handles every r-th mini-batch,

    share / r  +  reduce / r - reduce_square / r**2        (without the reduce parts where r = 1)

where `share` is work that replicas divide among them and the rest is the all-reduce of the stage's gradients, which
serves r mini-batches: for P bytes it takes P (r-1)/r, so both parts are P. Where a replica is a group of workers, the
layers inside it may have q replicas each; the ring is then q r long, and the parts are P/q and P/q². From r = 2 on,
such a price falls as r grows, which the search for many workers relies on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pl_pipe.cluster import Level
from pl_pipe.errors import PlanError


@dataclass(frozen=True)
class Segment:
    """Layers between two cuts; arrays where many segments are priced at once."""

    compute_s: NDArray[np.float64]
    """Forward and backward for one mini-batch; above the innermost level: what a group of workers needs for it."""
    forward_share: NDArray[np.float64]
    """The part of `compute_s` that is forward."""
    parameter_bytes: NDArray[np.float64]
    reduced_bytes: NDArray[np.float64]
    """Parameters by the number of their replicas inside the segment; innermost: the parameters."""
    reduced_square_bytes: NDArray[np.float64]
    """Parameters by the square of that number."""
    arriving_bytes: NDArray[np.float64]
    """Activations that cross the cut before the segment."""
    leaving_bytes: NDArray[np.float64]


@dataclass(frozen=True)
class Term:
    """`(share + reduce) / r - reduce_square / r**2`, and `share` alone for one replica."""

    share: NDArray[np.float64]
    reduce: NDArray[np.float64]
    reduce_square: NDArray[np.float64]

    def at(self, replicas: int) -> NDArray[np.float64]:
        if replicas == 1:
            return self.share
        return (self.share + self.reduce) / replicas - self.reduce_square / replicas**2

    def where(self, index: Any) -> "Term":
        """The same term of some segments."""
        return Term(*(np.asarray(part[index]) for part in (self.share, self.reduce, self.reduce_square)))


class CostModel(Protocol):
    """Prices of the first stage of a pipeline, and of the later ones."""

    @property
    def name(self) -> str: ...

    @property
    def compression(self) -> float | None: ...

    def first(self, segment: Segment, link: Level, *, inner_members: int) -> list[Term]: ...

    def later(self, segment: Segment, link: Level) -> list[Term]: ...


@dataclass(frozen=True)
class PipeDreamCosts:
    """The closed form of the original optimizer (SOSP'19 artifact): compute and all-reduce are added.

    Activations are counted only where a compression ratio is given, and the first stage of a pipeline is never charged
    for them. `inner_members` divides the all-reduce of a first stage, as the original has it.
    """

    compression: float | None = None
    name: str = "pipedream"

    def first(self, segment: Segment, link: Level, *, inner_members: int) -> list[Term]:
        reduce = 4 * segment.parameter_bytes / link.bandwidth / inner_members
        return [Term(segment.compute_s, reduce, reduce)]

    def later(self, segment: Segment, link: Level) -> list[Term]:
        reduce = 4 * segment.parameter_bytes / link.bandwidth
        terms = [Term(segment.compute_s, reduce, reduce)]
        if self.compression is not None:
            free = np.zeros_like(segment.compute_s)
            speed = link.bandwidth * self.compression
            for crossing_bytes in (segment.arriving_bytes, segment.leaving_bytes):
                terms.append(Term(2 * crossing_bytes / speed, free, free))
        return terms


@dataclass(frozen=True)
class OverlapCosts:
    """What the pipeline runtime does: communication goes on beside the computation.

    A stage is as slow as the slowest of: its computation; its forward pass and then the all-reduce, which starts with
    the backward pass; its link, over which a worker receives the activations of the stage before and the gradients of
    the stage behind (and at the same time sends as much), besides the all-reduce.
    """

    compression: float | None = None
    name: str = "overlap"

    def first(self, segment: Segment, link: Level, *, inner_members: int) -> list[Term]:  # noqa: ARG002
        return self._terms(segment, link, segment.leaving_bytes)

    def later(self, segment: Segment, link: Level) -> list[Term]:
        return self._terms(segment, link, segment.arriving_bytes + segment.leaving_bytes)

    def _terms(self, segment: Segment, link: Level, traffic_bytes: NDArray[np.float64]) -> list[Term]:
        free = np.zeros_like(segment.compute_s)
        factor = link.all_reduce_factor / link.bandwidth
        reduce, square = factor * segment.reduced_bytes, factor * segment.reduced_square_bytes
        share = segment.forward_share
        forward_s = np.where(share > 0, segment.compute_s, 0.0) * share  # a segment that cannot be served is infinite
        return [
            Term(segment.compute_s, free, free),
            Term(forward_s, reduce, square),
            Term(traffic_bytes / (link.bandwidth * (self.compression or 1.0)), reduce, square),
        ]


COST_MODELS: dict[str, Callable[[float | None], CostModel]] = {"pipedream": PipeDreamCosts, "overlap": OverlapCosts}


def cost_model(name: str, *, activation_compression_ratio: float | None) -> CostModel:
    """The model of that name."""
    if name not in COST_MODELS:
        raise PlanError(f"plan.cost_model={name} is unknown; choose one of {', '.join(COST_MODELS)}")
    if activation_compression_ratio is not None and not 0 < activation_compression_ratio < float("inf"):
        raise PlanError(
            f"plan.activation_compression_ratio={activation_compression_ratio} is not a positive number; 1.0 counts "
            f"activations in full, 2.0 by half"
        )
    return COST_MODELS[name](activation_compression_ratio)


def price(terms: list[Term], replicas: int) -> NDArray[np.float64]:
    """The largest of the terms."""
    worst = terms[0].at(replicas)
    for term in terms[1:]:
        worst = np.maximum(worst, term.at(replicas))
    return worst
