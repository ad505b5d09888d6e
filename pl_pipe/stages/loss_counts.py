"""Means over some of a batch's elements, made exact over its micro-batches. batch -> *counts* -> a step's losses.

`cross_entropy(ignore_index=…)` and `nll_loss` divide by the number of targets that count, or by their classes' weights.
Micro-batches have different numbers of them, so a mean of their means is another number than the whole batch's:

    part k    loss_k = sum_k / n_k              weighed by its share of the samples: wrong
    here      loss_k · n_k / (N · share_k)      adds up to  Σ sum_k / N: the loss of the whole batch

N has to be known at the first part. Targets follow from the batch alone, by operations that every rank runs; those are
noted once for each kind of batch and then repeated on all its parts, before any of them enters.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pl_pipe.errors import StageError
from pl_pipe.log import get_logger
from pl_pipe.tensors.ghosts import outside_steps, received, value_of
from pl_pipe.tensors.lineage import storage_key
from pl_pipe.tensors.operations import user_line
from pl_pipe.tensors.trees import map_tensors, tensors_in

_log = get_logger(__name__)
_COUNTED = (functional.cross_entropy, functional.nll_loss)
_NOT_LINEAR = (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "pow", "rpow", "square", "sqrt", "rsqrt", "reciprocal",
    "rtruediv", "sigmoid", "softplus", "tanh",
)  # fmt: skip
_IGNORED = -100
_TOLERANCE = 1e-4  # of counts, which may be sums of weights
_SAME = 1e-12

Site = tuple[str, int]
"""The line of a loss call, and which of the step's calls there it is."""


@dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any] | None
    """None where numbers were drawn, which another batch would draw anew."""
    arguments: Any
    results: list[Tensor]


class FreeOperations:
    """What a step does with the batch alone, in order: to be repeated on other batches of the same kind."""

    def __init__(self, batch: Any) -> None:
        self._inputs = tensors_in(batch)
        self._done: list[_Operation] = []

    def note(self, function: Callable[..., Any] | None, arguments: Any, out: Any) -> None:
        """Called by a step, with what it has just run."""
        self._done.append(_Operation(function, arguments, tensors_in(out)))

    def leading_to(self, target: Tensor) -> "TargetOf | None":
        """What makes the target of another batch; None where it does not follow from the batch."""
        needed, memory = {id(target)}, {storage_key(target)}
        kept: list[tuple[Callable[..., Any], _Operation]] = []
        for operation in reversed(self._done):
            given = tensors_in(operation.arguments)
            makes = any(id(result) in needed for result in operation.results)
            writes = any(storage_key(tensor) in memory for tensor in (*operation.results, *given[:1]))
            if (makes or writes) and operation.function is None:
                return None
            if (makes or writes) and operation.function is not None:
                kept.append((operation.function, operation))
                needed.update(id(tensor) for tensor in given)
                memory.update(storage_key(tensor) for tensor in given)
        kept.reverse()
        inputs = self._inputs
        if not any(id(tensor) in needed for tensor in inputs):
            return None

        def repeat(batch: Any) -> Tensor:
            made: dict[int, Any] = {}
            for mine, theirs in zip(inputs, tensors_in(batch), strict=True):
                made[id(mine)] = theirs.clone() if id(mine) in needed else theirs
            with torch.no_grad():
                for function, operation in kept:
                    args, kwargs = map_tensors(operation.arguments, lambda tensor: made.get(id(tensor), tensor))
                    out = function(*args, **kwargs)
                    made.update({id(old): new for old, new in zip(operation.results, tensors_in(out), strict=False)})
            found: Tensor = made[id(target)]
            return found

        return repeat


TargetOf: TypeAlias = Callable[[Any], Tensor]
"""Makes a loss call's target of a batch."""


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """What a mean over the target divides by."""
    valid = target != ignore_index
    if weight is None:
        return float(valid.sum())
    return float(weight.detach().to(target.device)[target[valid]].sum(dtype=torch.float64))


LossListener: TypeAlias = Callable[[Site, Mapping[str, Any], Tensor], Tensor]
"""Given a call's site, its arguments by name, and what it returns; returns what is returned instead."""


class loss_calls_heard(TorchFunctionMode):  # noqa: N801
    """Within the block, what counted losses return goes through `listener`, with their line and arguments.

    To be entered within a step, which then runs the calls as any other.
    """

    def __init__(self, listener: LossListener) -> None:
        super().__init__()
        self._listener = listener
        self._sites: Counter[str] = Counter()
        self._weighed: list[Tensor] = []
        """Losses that the listener has changed, and what was made of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _COUNTED:
            if self._weighed and any(one is given for one in self._weighed for given in args):
                name = getattr(func, "__name__", "")
                if name.strip("_") in _NOT_LINEAR:
                    _warn_of_use(user_line(), name.strip("_"))
                elif isinstance(out, Tensor):
                    self._weighed.append(out)
            return out
        given = _arguments(*args, **(kwargs or {}))
        if given is None or given["target"].is_floating_point():
            return out
        line = user_line()
        site = line, self._sites[line]
        self._sites[line] += 1
        found = self._listener(site, given, out)
        if found is not out:
            self._weighed.append(found)
        return found


def _arguments(
    input: Tensor,  # noqa: A002 - torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = _IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    *_: Any,
    **__: Any,
) -> dict[str, Any] | None:
    """Of a counted loss; None of one that is no mean."""
    if reduction != "mean" or size_average is False or reduce is False:
        return None
    return {"input": input, "target": target, "weight": weight, "ignore_index": ignore_index}


class CallsNoted:
    """Listens to a step that runs for its Python alone, and notes how its targets are made."""

    def __init__(self, operations: FreeOperations) -> None:
        self._operations = operations
        self.calls: dict[Site, TargetOf] = {}

    def __call__(self, site: Site, given: Mapping[str, Any], out: Tensor) -> Tensor:
        target = given["target"]
        with outside_steps():
            is_here = value_of(target) is None and not target.is_meta
        if is_here:
            target_of = self._operations.leading_to(target)
            if target_of is not None:
                self.calls[site] = target_of
        return out


class BatchInParts:
    """A batch's parts, and the losses of its steps that are to be weighed."""

    def __init__(self, calls: Sequence[Mapping[Site, TargetOf]], parts: Sequence[Any], shares: Sequence[float]) -> None:
        """`calls` are those of each part's step, which may depend on its shapes."""
        self._calls, self._parts, self._shares = calls, parts, shares
        self._targets: dict[Site, list[Tensor]] = {}

    def listener(self, part: int) -> LossListener:
        """For the step of one part."""

        def weigh(site: Site, given: Mapping[str, Any], out: Tensor) -> Tensor:
            with outside_steps():
                weight, ignored = received(given["weight"]), given["ignore_index"]
                needed = [one for one in (out, given["target"], weight) if one is not None]
                if any(one.is_meta for one in needed):
                    return out  # another rank's, whose numbers are not here
                if not all(site in calls for calls in self._calls):
                    if weight is not None or counted(given["target"], None, ignored) < given["target"].numel():
                        _warn_once(site[0])
                    return out
                if site not in self._targets:
                    pairs = zip(self._calls, self._parts, strict=True)
                    self._targets[site] = [calls[site](content) for calls, content in pairs]
                counts = [counted(target, weight, ignored) for target in self._targets[site]]
                found = counted(given["target"], weight, ignored)
            if abs(found - counts[part]) > _TOLERANCE * max(1.0, abs(found)):
                raise StageError(
                    f"{site[0]}: the loss counts {found:g} targets of a micro-batch, and by its first batch it would "
                    f"be {counts[part]:g}, so it cannot be weighed; set num_microbatches=1"
                )
            return _weighed(out, given["input"], counts, part, self._shares[part])

        return weigh


@cache
def _warn_once(line: str) -> None:
    _log.warning(
        "%s: a loss over some of its targets, whose number in the whole batch cannot be told before its micro-batches "
        "run (they do not follow from the batch alone); the weights will not be those of one device: set "
        "num_microbatches=1",
        line,
    )  # fmt: skip


@cache
def _warn_of_use(line: str, name: str) -> None:
    _log.warning(
        "%s: %s of a loss that is weighed by its micro-batch's part of the targets; only sums and multiples of such "
        "losses are the batch's: make it of the mean that was logged, or set num_microbatches=1",
        line, name,
    )  # fmt: skip


def _weighed(out: Tensor, scores: Tensor, counts: Sequence[float], part: int, share: float) -> Tensor:
    total = sum(counts)
    if not total or abs(counts[part] / total - share) < _SAME:
        return out
    if not counts[part]:
        return scores.sum() * 0.0  # a mean over nothing is no number
    return out * (counts[part] / (total * share))


def loss_over_parts(
    step: Callable[[Any], Tensor], parts: Sequence[Any], shares: Sequence[float], *, begin: Callable[[], None]
) -> float:
    """The loss that a batch has when its parts run one by one, on one device, with counted losses weighed.

    `begin` is called before the first part, each time that they run.
    """
    counts: list[dict[Site, float]] = []

    def note(site: Site, given: Mapping[str, Any], out: Tensor) -> Tensor:
        counts[-1][site] = counted(given["target"], given["weight"], given["ignore_index"])
        return out

    plain = []
    begin()
    for content in parts:
        counts.append({})
        with loss_calls_heard(note):
            plain.append(float(step(content)))
    if not any(_is_uneven([found.get(site, 0.0) for found in counts], shares) for site in set().union(*counts)):
        return sum(share * loss for share, loss in zip(shares, plain, strict=True))
    total = 0.0
    begin()
    for part, content in enumerate(parts):

        def weigh(site: Site, given: Mapping[str, Any], out: Tensor, part: int = part) -> Tensor:
            return _weighed(out, given["input"], [found.get(site, 0.0) for found in counts], part, shares[part])

        with loss_calls_heard(weigh):
            total += shares[part] * float(step(content))
    return total


def _is_uneven(counts: Sequence[float], shares: Sequence[float]) -> bool:
    total = sum(counts)
    return any(abs(count - share * total) > _SAME * total for count, share in zip(counts, shares, strict=True))
