"""How long a data loader takes for a batch."""

import time
from collections.abc import Iterable
from itertools import islice
from statistics import median
from typing import Any

from pl_pipe.errors import ProfileError


def time_loading(loader: Iterable[Any], batches: int = 10) -> float:
    """Median seconds to fetch a batch; the first, which also starts the workers, is left out where there are more."""
    if batches < 1:
        raise ProfileError(f"batches={batches} is too small to time a data loader; set 1 or more")
    durations_s = []
    start = time.perf_counter()
    for _ in islice(loader, batches + 1):
        durations_s.append(time.perf_counter() - start)
        start = time.perf_counter()
    if not durations_s:
        raise ProfileError("the data loader gave no batch to time; check the data set's length and drop_last")
    return median(durations_s[1:] or durations_s)
