"""How the command line speaks of errors: one message, or a traceback for those who ask for it."""

import os

from rich.console import Console

from pl_pipe.errors import PlPipeError

DEBUG_VARIABLE = "PL_PIPE_DEBUG"


def set_debug(debug: bool) -> None:
    """`--debug` becomes an environment variable, so that the processes a run starts follow it too."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def print_error(error: PlPipeError) -> None:
    """Prints `error` as one message; ranks other than the first say who they are."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    who = "pl-pipe" if rank == "0" else f"pl-pipe [rank {rank}]"
    Console(stderr=True).print(f"{who}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Prints `text` as it is: paths and override syntax must not be read as markup."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
