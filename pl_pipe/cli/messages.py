"""How the command line speaks of errors: one message, or a traceback for those who ask for it."""

import os

from rich.console import Console

from pl_pipe.errors import PlPipeError

DEBUG_VARIABLE = "PL_PIPE_DEBUG"
_REMEDIES = {
    "is not a subclass of LinkConfig": "a link has settings of its own, in a lab's between, inside and each of its "
    "links: write between: {rate: 1gbit}, also latency: 200us and loss: 0.1%",
}
"""For refusals that do not say what to do."""


def set_debug(debug: bool) -> None:
    """`--debug` becomes an environment variable, so that the processes a run starts follow it too."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def rank_name() -> str:
    """This process's rank, as whoever started it says."""
    known = (os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ)
    return next(known, "0")


def print_error(error: PlPipeError) -> None:
    """Prints `error` as one message; ranks other than the first say who they are."""
    who = "pl-pipe" if rank_name() == "0" else f"pl-pipe [rank {rank_name()}]"
    Console(stderr=True).print(f"{who}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


def explain(error: BaseException) -> str:
    """A foreign error in its own words, with the causes that Hydra would show only in a traceback."""
    text = str(error).replace(", set env var HYDRA_FULL_ERROR=1 to see chained exception.", "").strip()
    lines = [text or type(error).__name__]
    cause = error.__cause__
    while cause is not None:
        if str(cause) not in text:
            lines.append(f"  because: {type(cause).__name__}: {cause}")
        cause = cause.__cause__
    lines += [remedy for words, remedy in _REMEDIES.items() if any(words in line for line in lines)]
    return "\n".join(lines) + "\n(--debug shows where)"


def say(text: str) -> None:
    """Prints `text` as it is: paths and override syntax must not be read as markup."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
