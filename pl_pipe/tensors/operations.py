"""What an operation is called, and which calls are no layers: looks at shapes, and reads of values.

The ghost mode must take the same calls for layers, or a plan would not fit the step it was made from.
"""

import copy
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# Answered from a tensor's metadata, or concerned with autograd's bookkeeping only.
# fmt: off
NO_LAYERS = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_same_size", "has_names", "is_pinned", "is_shared", "get_device",
    "data_ptr", "storage", "untyped_storage", "requires_grad_", "retain_grad", "register_hook", "__len__", "__hash__",
    "register_post_accumulate_grad_hook", "_set_grad_enabled", "__get__", "__set__", "__delete__",
})
# The step's own Python sees numbers: a pipeline must have them wherever that Python runs.
VALUE_READS = frozenset({
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__contains__", "__array__", "__dlpack__", "__format__", "__repr__", "__reduce_ex__",
})
# fmt: on
# Properties that compute; all others (`.shape`, `.device`, `.grad`) only look.
_COMPUTED_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Outputs that follow from batch tensors alone (lengths, batch sizes), though the operation also takes a layer's output.
FREE_OUTPUTS = {"_pack_padded_sequence": (1,), "_pad_packed_sequence": (1,)}

_PLAIN_NAMES = {
    "__eq__": "eq",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_",
    "__invert__": "bitwise_not",
    "__rdiv__": "div",
    "__rtruediv__": "div",
    "__idiv__": "div_",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide_",
    "__rmod__": "remainder",
    "__imod__": "remainder_",
    "__rpow__": "pow",
    "__ipow__": "pow_",
    "__rsub__": "rsub",
    "__rmatmul__": "matmul",
    "__reversed__": "flip",
    "__deepcopy__": "deepcopy",
}
_PARTS = ("tensors", "profiling", "fusion", "strategies", "comm", "stages", "runtime")
_PL_PIPE = Path(__file__).parents[1]
_CALLS_HOOKS = str(_PL_PIPE / "strategies" / "pipeline" / "hook_steps.py")
_LIGHTNING = find_spec("lightning")
_NOT_THE_USERS = (
    copy.__file__,
    *(
        f"{folder}{os.sep}"
        for folder in (
            Path(torch.__file__).parent,
            *(
                _PL_PIPE / name
                for name in ("tensors", "profiling", "fusion", "strategies", "comm", "stages", "runtime")
            ),
            *(_LIGHTNING.submodule_search_locations or () if _LIGHTNING else ()),
        )
    ),
)


def operation_name(function: Callable[..., Any]) -> str:
    """`add` for `x + y`, `T` for `x.T`; a name of NO_LAYERS for properties that compute nothing."""
    name: str = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        property_name = str(getattr(getattr(function, "__self__", None), "__name__", ""))
        return property_name if property_name in _COMPUTED_PROPERTIES else name
    return _PLAIN_NAMES.get(name) or name.split(".")[0] or name


def user_line() -> str:
    """`model.py:17`: the innermost line that is neither torch's, Lightning's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_place() -> int:
    """A number for all the user's lines that lead here, from the hook on that we have called."""
    frame, lines = sys._getframe(1), []
    while frame.f_back is not None and frame.f_code.co_filename != _CALLS_HOOKS:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return zlib.crc32("\n".join(lines).encode()) or 1


def user_line_of(error: BaseException) -> str:
    """The innermost such line among those that an error has come through."""
    lines = traceback.extract_tb(error.__traceback__)
    theirs = [line for line in lines if not line.filename.startswith(_NOT_THE_USERS)]
    found = (theirs or lines)[-1]
    return f"{Path(found.filename).name}:{found.lineno}"
