"""Where arrays cannot do what the user's Python asks for, and what helps. mode -> *messages* -> errors."""

from collections.abc import Callable

from pl_pipe.tensors.operations import user_line

Layer = Callable[[], str]
"""The innermost module whose forward is running, which `fuse_except` may name; empty for the outermost."""


def place(layer: Layer) -> str:
    """`model.py:12 (in layer3.attention)`"""
    name = layer()
    return f"{user_line()}{f' (in {name})' if name else ''}"


def remedy(layer: Layer | None = None) -> str:
    """Without `layer`, nobody knows which module it was."""
    name = None if layer is None else layer()
    if name is None:
        return "let the module that does so run once a variant: fuse_except=[its name]"
    if not name:
        return "move it into a module of its own and name that in fuse_except, which runs it once a variant"
    return f"let that part run once a variant: fuse_except=['{name}']"
