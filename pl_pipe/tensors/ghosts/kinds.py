"""How an operation is to be treated, by its name; looked up once a function."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from pl_pipe.tensors.operations import NO_LAYERS, VALUE_READS, operation_name


class Kind(Enum):
    """What a function does with its tensors."""

    LOOK = "metadata only"
    READ = "values become Python numbers"
    GRADIENT = "runs autograd inside the step"
    RANDOM = "draws random numbers"
    SHAPED_BY_VALUES = "the result's shape depends on values"
    PLAIN = "computes"


class Operation(NamedTuple):
    name: str
    kind: Kind
    in_place: bool
    """By its name; `out=` and `inplace=True` are arguments."""


# fmt: off
_RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal", "poisson",
    "multinomial", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "dropout_",
    "feature_alpha_dropout", "rrelu", "gumbel_softmax", "uniform_", "normal_", "bernoulli_", "random_", "exponential_",
    "cauchy_", "geometric_", "log_normal_", "binomial", "native_dropout", "alpha_dropout_", "feature_dropout_",
    "feature_alpha_dropout_", "rrelu_", "rrelu_with_noise", "_standard_gamma", "_sample_dirichlet",
    "fractional_max_pool2d", "fractional_max_pool3d", "_fractional_max_pool2d", "_fractional_max_pool3d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices",
})
_SHAPED_BY_VALUES = frozenset({
    "nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "argwhere", "nms",
    "_unique2", "_return_output", "_return_inverse", "_return_counts", "_return_inverse_and_counts",
})
_IN_PLACE = frozenset({
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__", "__ilshift__", "__irshift__", "__setitem__",
})
# fmt: on
INDEXING = frozenset({"__getitem__", "masked_select", "index_put", "take"})

_known: dict[Callable[..., Any], Operation] = {}


def operation_of(function: Callable[..., Any]) -> Operation:
    try:
        return _known[function]
    except KeyError:
        pass
    name = operation_name(function)
    if name in NO_LAYERS:
        kind = Kind.LOOK
    elif name in VALUE_READS:
        kind = Kind.READ
    elif name in ("backward", "grad"):
        kind = Kind.GRADIENT
    elif name in _RANDOM:
        kind = Kind.RANDOM
    elif name in _SHAPED_BY_VALUES:
        kind = Kind.SHAPED_BY_VALUES
    else:
        kind = Kind.PLAIN
    in_place = name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__")
    operation = _known[function] = Operation(name, kind, in_place)
    return operation


def property_name(function: Callable[..., Any]) -> str:
    """`device` for the getter behind `tensor.device`."""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))
