"""pl-pipe: train an unchanged LightningModule in ways stock Lightning cannot."""

from pl_pipe._version import __version__

__all__ = ["__version__"]
