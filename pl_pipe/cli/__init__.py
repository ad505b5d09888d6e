"""The command line: Typer in front, Hydra behind."""

from pl_pipe.cli.app import main

__all__ = ["main"]
