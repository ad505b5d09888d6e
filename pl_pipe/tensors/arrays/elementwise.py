"""Element-wise operations act on [M, …] directly: only their operands' ranks must be made to fit.

x [M, N, C] + b [M, C]      b is seen as [M, 1, C]; shared operands broadcast from the right by themselves
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pl_pipe.tensors.arrays.marks import is_array, mark_all, rank

# fmt: off
_UNARY = (
    "abs", "acos", "acosh", "angle", "arccos", "arcsin", "arctan", "asin", "asinh", "atan", "atanh", "bitwise_not",
    "ceil", "clone", "conj", "cos", "cosh", "deg2rad", "detach", "deepcopy", "digamma", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "fix", "floor", "frac", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal",
    "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit", "nan_to_num", "neg", "negative", "positive",
    "rad2deg", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "signbit", "sin",
    "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "celu", "elu", "gelu", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "silu", "softplus", "softshrink", "softsign",
    "tanhshrink", "threshold", "bool", "byte", "char", "double", "float", "half", "bfloat16", "int", "long", "short",
    "cpu", "cuda", "type", "zeros_like", "ones_like", "full_like", "empty_like", "data", "real", "imag", "alias",
    "fill", "zero", "detach_", "requires_grad_",
)
_BROADCAST = (
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder",
    "fmod", "pow", "float_power", "eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_left_shift", "bitwise_right_shift", "maximum", "minimum", "fmax", "fmin", "max", "min", "atan2",
    "arctan2", "hypot", "copysign", "xlogy", "logaddexp", "logaddexp2", "ldexp", "nextafter", "clamp", "clamp_min",
    "clamp_max", "clip", "lerp", "addcmul", "addcdiv", "where", "masked_fill", "copy", "heaviside", "__rsub__",
    "__rpow__", "__rdiv__",
)
# fmt: on
_CONVERSIONS = ("to", "type_as")  # another tensor only says what to convert to
ELEMENTWISE = (
    frozenset(_UNARY)
    | frozenset(_CONVERSIONS)
    | frozenset(_BROADCAST)
    | {f"{name}_" for name in (*_UNARY, *_BROADCAST)}
)
_UNARY_NAMES = frozenset(_UNARY) | {f"{name}_" for name in _UNARY}
_NEED_TWO = {"max": 2, "min": 2, "where": 3}  # with fewer tensors they are other operations
_NO_LAYOUT = ("to", "clone", "empty_like", "zeros_like", "ones_like", "full_like")


def elementwise(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result on the whole array, or NotImplemented where this is no plain element-wise call."""
    if name in _CONVERSIONS and "memory_format" not in kwargs:
        out = function(*args, **kwargs)
        return mark_all(out) if is_array(args[0]) else out
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if name in _NEED_TWO and (len(args) < _NEED_TWO[name] or not isinstance(args[1], Tensor)):
        return NotImplemented
    if kwargs and (kwargs.get("out") is not None or ("memory_format" in kwargs and name in _NO_LAYOUT)):
        return NotImplemented
    if len(operands) == 1:
        return mark_all(function(*args, **kwargs))
    if name in _UNARY_NAMES:
        return NotImplemented
    ranks = [rank(operand) for operand in operands]
    full = max(ranks)
    has_numbers = any(is_array(operand) and own == 0 for operand, own in zip(operands, ranks, strict=True))
    if has_numbers and len({operand.dtype for operand in operands}) > 1:
        return NotImplemented  # a number's type gives way to a tensor's, and [M] would not be seen as a number
    if any(own != full and is_array(operand) for operand, own in zip(operands, ranks, strict=True)):
        args = tuple(widened(value, full) for value in args)
        kwargs = {key: widened(value, full) for key, value in kwargs.items()}
    return mark_all(function(*args, **kwargs))


def widened(value: Any, full: int) -> Any:
    """An array with ones after the variants' dimension, so that `full` dimensions are seen."""
    if not is_array(value) or value.ndim - 1 >= full:
        return value
    return value[(slice(None), *(None,) * (full - (value.ndim - 1)))]
