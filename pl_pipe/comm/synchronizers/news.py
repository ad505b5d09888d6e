"""A broken connection is noticed before the news of why it broke. rules -> *will_be_known* -> lifelines."""

import time
from collections.abc import Callable

_NEWS_S, _LOOK_S = 5.0, 0.02


def will_be_known(is_gone: Callable[[int], bool], rank: int) -> bool:
    """Whether it turns out that the rank has ended and the others do without it."""
    deadline_s = time.monotonic() + _NEWS_S
    while not is_gone(rank):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True
