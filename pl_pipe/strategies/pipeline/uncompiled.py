"""Compiled parts run uncompiled while they are divided. torch.compile -> *uncompiled* -> plan, stages.

The other stages have a part's shapes alone, with which the compiler can do nothing. What `torch.compile` has wrapped
(modules, methods, functions that a module keeps) stays in its place, so that names and state dictionaries are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import nn

from pl_pipe.log import get_logger
from pl_pipe.tensors.interception import UNCOMPILED

log = get_logger(__name__)

_ORIGINAL = "_torchdynamo_orig_callable"  # of what the compiler returns
_WHOLE = "_compiler_ctx"  # what Lightning keeps of a module that was compiled as a whole
_CALL = "_compiled_call_impl"  # set by nn.Module.compile
_ABSENT = object()


@contextmanager
def uncompiled(module: L.LightningModule, *, says_so: bool) -> Iterator[None]:
    """Within the block nothing of the module is compiled."""
    compiled: list[str] = []
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for name, part in module.named_modules():
        attributes: Any = vars(part)
        plain = _plain_attributes(part)
        if plain:
            compiled.append(name or type(part).__name__)
            before.append((attributes, {key: attributes.get(key, _ABSENT) for key in plain}))
            attributes.update(plain)
    if compiled and says_so:
        log.warning(
            "%s is compiled (torch.compile), and runs uncompiled here: the compiler cannot run it for its shapes "
            "alone, as the other stages of a pipeline do",
            ", ".join(compiled),
        )
    try:
        yield
    finally:
        for attributes, found in before:
            for key, value in found.items():
                if value is _ABSENT:
                    attributes.pop(key, None)
                else:
                    attributes[key] = value


def _plain_attributes(part: nn.Module) -> dict[str, Any]:
    """What has to stand in the place of what is compiled."""
    attributes = vars(part)
    plain: dict[str, Any] = {name: _original(value) for name, value in attributes.items()}
    plain = {name: original for name, original in plain.items() if original is not None}
    wrapped = part._modules.get("_orig_mod")
    if wrapped is not None:
        plain |= {"forward": wrapped.__call__, UNCOMPILED: True}
    if attributes.get(_CALL) is not None:
        plain[_CALL] = None
    if attributes.get(_WHOLE) is not None:
        plain[_WHOLE] = None
    return plain


def _original(value: Any) -> Callable[..., Any] | None:
    """What the compiler was given, if it has returned this."""
    if isinstance(value, nn.Module):
        return None
    stored = getattr(value, "__dict__", {})
    found: Callable[..., Any] | None = stored.get(_ORIGINAL) if isinstance(stored, dict) else None
    return found
