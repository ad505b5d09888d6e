"""Settings that must be numbers are. values of any kind -> *checks* -> an error that says which is none."""

import math
from typing import TypeGuard

from pl_pipe.errors import ConfigError


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r} is no whole number; give one, such as 1")


def check_numbers(**values: object) -> None:
    for name, value in values.items():
        if not is_number(value):
            raise ConfigError(f"{name}={value!r} is no number; give one, such as 1.5")
