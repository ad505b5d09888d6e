"""How much each member of a group counts. steps behind each -> *weights* -> averaging.

`constant`: all alike. `dynamic`: what has fewer steps behind it counts less, by powers of alpha; the weights of steps
that nobody stands at go to the member that is furthest behind (Partial Reduce, SIGMOD'21, as its followers wrote it
down; the paper's own formula was not at hand).
"""

from collections import Counter
from collections.abc import Sequence

from pl_pipe.errors import ConfigError

AVERAGING = ("constant", "dynamic")
ALPHA = 0.5


def check_averaging(averaging: str, alpha: float) -> None:
    if averaging not in AVERAGING:
        raise ConfigError(f"averaging={averaging} is unknown; choose {' or '.join(AVERAGING)}")
    if not isinstance(alpha, int | float) or not 0 < alpha < 1:
        raise ConfigError(f"alpha={alpha!r}; give a number between 0 and 1, such as {ALPHA}")


def weights(iterations: Sequence[int], *, averaging: str, alpha: float = ALPHA) -> tuple[float, ...]:
    """One for each member, in all 1."""
    if averaging == "constant" or len(set(iterations)) == 1:
        return (1 / len(iterations),) * len(iterations)
    least = min(iterations)
    places = [iteration - least + 1 for iteration in iterations]
    slots = max(places)
    members = Counter(places)
    scale = (1 - alpha) / (1 - alpha**slots)
    shares = {place: scale * alpha ** (slots - place) for place in range(1, slots + 1)}
    empty = sum(share for place, share in shares.items() if place not in members)
    shares[1] += empty
    return tuple(shares[place] / members[place] for place in places)
