"""The options of FusionStrategy, checked. arguments -> *settings* -> strategy."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pl_pipe.errors import ConfigError

ARRAY, LOCKSTEP, ONE_BY_ONE, AUTO = "array", "model array", "one by one", "auto"
BRANCHES, CAPTURED_ARRAY = "branches", "captured array"
COMPILED_BRANCHES, COMPILED_ARRAY = "compiled branches", "compiled array"
REPLAYED = (BRANCHES, CAPTURED_ARRAY, COMPILED_BRANCHES, COMPILED_ARRAY)
TIMED, USUAL = "timed", "usual"
TUNED = "tuned"
WITHOUT_FUSION = 'Trainer(strategy="auto") (strategy=single on the command line)'
"""What errors advise."""
_FORMULATIONS = (AUTO, ARRAY, LOCKSTEP, ONE_BY_ONE, *REPLAYED)


@dataclass(frozen=True)
class FusionSettings:
    max_array: int | str = AUTO
    fuse_except: tuple[str, ...] = ()
    formulation: str = AUTO
    monitor: str | None = None
    mode: str | None = None
    """`min` or `max`; None goes by the monitor's name."""
    compile: bool | str = AUTO
    """Whether compiled steps are tried on a GPU; `auto` where the training is long enough to repay it; `tuned` with
    kernels that are tuned."""
    layers: str = AUTO
    """How an array's layers are computed: the quickest by measurement, or what is usual; `auto` measures on a GPU,
    unless steps are compiled."""

    def __post_init__(self) -> None:
        width = self.max_array
        if width != AUTO and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise ConfigError(f"max_array={width} is no width; give auto or a number of variants, 1 or more")
        if self.formulation not in _FORMULATIONS:
            raise ConfigError(f"formulation={self.formulation} is unknown; choose one of {', '.join(_FORMULATIONS)}")
        if self.compile not in (True, False, TUNED, AUTO):
            raise ConfigError(f"compile={self.compile} is unknown; choose true, false, {TUNED} or auto")
        if self.layers not in (TIMED, USUAL, AUTO):
            raise ConfigError(f"layers={self.layers} is unknown; choose {TIMED}, {USUAL} or auto")
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise ConfigError(f"monitor={self.monitor!r} is no name; give that of a metric which the model logs")
        if self.mode not in (None, "min", "max"):
            raise ConfigError(f"mode={self.mode} is unknown; choose min or max")


def checked_options(
    options: Mapping[str, Any], *, strategy: type, own: Callable[..., None], known: Sequence[str]
) -> dict[str, Any]:
    """What is no option of ours must be one of those `known` beneath; a misspelt one would be swallowed by DDP's."""
    unknown = [name for name in options if name not in known]
    if unknown:
        ours = [name for name in inspect.signature(own).parameters if name not in ("self", "options")]
        raise ConfigError(
            f"{unknown[0]}={options[unknown[0]]!r} is no option of {strategy.__name__}; it has {', '.join(ours)}, and "
            f"Lightning's {', '.join(known)}"
        )
    return dict(options)


def names_of(fuse_except: Sequence[str] | str | None) -> tuple[str, ...]:
    if isinstance(fuse_except, str):
        raise ConfigError(f"fuse_except is {fuse_except!r}; give a list of names: [{fuse_except!r}]")
    names = tuple(fuse_except or ())
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        raise ConfigError(f"fuse_except has {odd[0]!r}, which is no name; give those of modules: ['layer1.*']")
    return names


def seeds_of(seeds: Any, variants: int | None) -> list[int] | None:
    """One for each variant; without `variants`, as many as there are."""
    if seeds is None:
        return None
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        raise ConfigError(f"seeds is {seeds!r}; give a list, one seed for each variant")
    if variants is None and not seeds:
        raise ConfigError("seeds is an empty list; give at least one, or variants")
    if variants is not None and len(seeds) != variants:
        raise ConfigError(f"seeds: {len(seeds)}, variants: {variants}; give one seed for each variant")
    for place, seed in enumerate(seeds):
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**32:
            raise ConfigError(f"seeds[{place}] is {seed!r}; choose a whole number from 0 to {2**32 - 1}")
    return [int(seed) for seed in seeds]
