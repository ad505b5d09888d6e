"""Rates, delays and losses of links as `tc` writes them: `1gbit`, `5ms`, `0.1%`. settings -> *link text* -> links."""

import re

from pl_pipe.errors import ConfigError

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"

UNCAPPED = "uncapped"
"""A link's rate where only the machine limits it."""
LEAST_RATE = 1e4
"""Bits a second: below it a single packet takes longer than a second."""
MOST_RATE = 1e12
"""Bits a second: beyond it `tc` cannot count what may pass at once."""
LONGEST_S = 60.0
"""Of a delay: beyond it every connection is given up."""


def parse_rate(text: str, *, name: str) -> float:
    """`100mbit` -> 1e8 bits a second; `name` is what the user calls the setting."""
    found = re.fullmatch(rf"{_NUMBER}\s*({'|'.join(_BITS)})", str(text).strip().lower())
    rate = float(found[1]) * _BITS[found[2]] if found else 0.0
    if rate < LEAST_RATE:
        raise ConfigError(
            f"{name}={text} is no rate of {format_rate(LEAST_RATE)} or more; give one such as 100mbit or 1gbit"
        )
    if rate > MOST_RATE:
        raise ConfigError(f"{name}={text} is more than {format_rate(MOST_RATE)}; give a rate up to that")
    return rate


def parse_cap(text: str, *, name: str) -> float | None:
    """A link's rate, or None for `uncapped`."""
    return None if str(text).strip().lower() == UNCAPPED else parse_rate(text, name=name)


def is_no_rate(text: str) -> bool:
    """Whether it says that nothing is to flow: `0`, `0mbit`."""
    return re.fullmatch(rf"0+(?:\.0*)?\s*(?:{'|'.join(_BITS)})?", text.strip().lower()) is not None


def parse_delay(text: str, *, name: str) -> float:
    """`5ms` -> 0.005 seconds."""
    found = re.fullmatch(rf"{_NUMBER}\s*({'|'.join(_SECONDS)})", str(text).strip().lower())
    if found is None and str(text).strip() != "0":
        raise ConfigError(f"{name}={text} is no delay; give one such as 200us, 5ms or 0")
    delay_s = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if delay_s > LONGEST_S:
        raise ConfigError(f"{name}={text} is longer than {LONGEST_S:g}s; give a delay such as 200us, 5ms or 0")
    return delay_s


def parse_loss(text: str, *, name: str) -> float:
    """`0.1%` -> 0.001, the share of packets that are lost."""
    found = re.fullmatch(rf"{_NUMBER}\s*%", str(text).strip())
    if found is None and str(text).strip() != "0":
        raise ConfigError(f"{name}={text} is no loss; give a percentage such as 0.1%, or 0")
    loss = float(found[1]) / 100 if found else 0.0
    if loss >= 1:
        raise ConfigError(f"{name}={text} leaves no packet; give less than 100%")
    return loss


def format_rate(bits_per_s: float) -> str:
    """`1e9` -> `1gbit`, which `parse_rate` and `tc` read again."""
    for name, size in reversed(_BITS.items()):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.10g}{name}"
    return f"{bits_per_s:.10g}bit"


def format_delay(seconds: float) -> str:
    """`0.005` -> `5ms`, in whole microseconds below a millisecond as `tc` has them."""
    return f"{seconds * 1e3:.10g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.10g}us"


def format_loss(share: float) -> str:
    return f"{share * 100:.10g}%"
