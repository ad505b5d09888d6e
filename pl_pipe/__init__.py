"""pl-pipe: train an unchanged LightningModule in ways stock Lightning cannot."""

from typing import TYPE_CHECKING, Any

from pl_pipe._version import __version__
from pl_pipe.registration import register_strategies

if TYPE_CHECKING:
    from pl_pipe.profiling import profile

__all__ = ["__version__", "profile"]

register_strategies()


def __getattr__(name: str) -> Any:
    """`pl_pipe.profile` on first use: importing the package must not wait for torch."""
    if name == "profile":
        from pl_pipe.profiling import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
