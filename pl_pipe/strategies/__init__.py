"""Strategies: thin adapters between Lightning's hooks and the runtime, one file each."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_pipe.strategies.auto import AutoStrategy
    from pl_pipe.strategies.pipedream import PipeDreamStrategy

__all__ = ["AutoStrategy", "PipeDreamStrategy"]


def __getattr__(name: str) -> Any:
    """On first use: composing a configuration must not wait for Lightning."""
    if name == "PipeDreamStrategy":
        from pl_pipe.strategies.pipedream import PipeDreamStrategy

        return PipeDreamStrategy
    if name == "AutoStrategy":
        from pl_pipe.strategies.auto import AutoStrategy

        return AutoStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
