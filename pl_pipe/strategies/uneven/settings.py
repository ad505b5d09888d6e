"""The options of data parallelism among uneven workers, checked. strategies -> *UnevenSettings* -> synchronizers."""

import math
from dataclasses import dataclass, fields
from typing import Any

from pl_pipe.comm.synchronizers.pace import check_every
from pl_pipe.comm.synchronizers.sma import PULL, check_pull
from pl_pipe.comm.synchronizers.wave import STEPS, check_steps
from pl_pipe.errors import ConfigError
from pl_pipe.grouping import ALPHA, GroupRules, check_averaging, check_distance

SYNCHRONIZERS = ("allreduce", "local", "partial_reduce", "ad_psgd", "sma", "pair", "wave")
SURVIVING = ("local", "partial_reduce", "ad_psgd", "pair")
ON_FAULT = ("leave", "stop")
_LAUNCH = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_OF = {
    "partial_reduce": (
        "every", "averaging", "alpha", "first_wait_s", "shortest_wait_s", "longest_wait_s", "group_size",
        "connect_every", "pairs_above",
    ),
    "ad_psgd": ("every", "matching", "seed"),
    "pair": ("every", "seed"),
    "sma": ("every", "pull"),
    "wave": ("wave", "distance", "servers"),
}  # fmt: skip
_INSTEAD = {
    ("every", "wave"): "set wave={} for as many steps in a wave",
    ("every", "allreduce"): "set trainer.accumulate_grad_batches={} for as many batches in a step",
}


@dataclass(frozen=True)
class UnevenSettings:
    """What workers do after a step, and when one of them ends."""

    synchronizer: str = "partial_reduce"
    every: int = 1
    averaging: str = "constant"
    alpha: float = ALPHA
    first_wait_s: float = GroupRules.first_wait_s
    shortest_wait_s: float = GroupRules.shortest_wait_s
    longest_wait_s: float = GroupRules.longest_wait_s
    group_size: int | None = None
    connect_every: int = GroupRules.connect_every
    pairs_above: int = GroupRules.pairs_above
    matching: bool = False
    seed: int = 0
    pull: float = PULL
    wave: int = STEPS
    distance: int = 0
    servers: int | None = None
    on_fault: str | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.synchronizer not in SYNCHRONIZERS:
            raise ConfigError(f"synchronizer={self.synchronizer} is unknown; choose one of {', '.join(SYNCHRONIZERS)}")
        self._refuse_others()
        check_every(self.every)
        check_averaging(self.averaging, self.alpha)
        if self.averaging == "constant" and self.alpha != ALPHA:
            raise ConfigError(
                f"alpha={self.alpha:g} is for averaging=dynamic, and this run has averaging=constant; set "
                f"averaging=dynamic, or leave it out"
            )
        check_pull(self.pull)
        check_steps(self.wave)
        check_distance(self.distance)
        _ = self.rules
        if not isinstance(self.matching, bool):
            raise ConfigError(f"matching={self.matching!r}; give true or false")
        if self.on_fault is not None and self.on_fault not in ON_FAULT:
            raise ConfigError(f"on_fault={self.on_fault} is unknown; choose {' or '.join(ON_FAULT)}")
        if self.on_fault == "leave" and not self.can_survive:
            raise ConfigError(
                f"on_fault=leave, but {self._name} waits for every worker in every step, and cannot go on without one; "
                f"set on_fault=stop, or synchronizer=partial_reduce"
            )
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s!r}; give the seconds after which a silent peer is an error")

    @property
    def rules(self) -> GroupRules:
        return GroupRules(
            first_wait_s=self.first_wait_s,
            shortest_wait_s=self.shortest_wait_s,
            longest_wait_s=self.longest_wait_s,
            group_size=self.group_size,
            connect_every=self.connect_every,
            pairs_above=self.pairs_above,
        )

    @property
    def lockstep(self) -> bool:
        """All workers take equally many steps."""
        return self.synchronizer in ("allreduce", "sma") or self.matching

    @property
    def can_survive(self) -> bool:
        return self.synchronizer in SURVIVING and not self.matching

    @property
    def survives(self) -> bool:
        """Whether the others go on when a worker ends."""
        return self.can_survive and self.on_fault != "stop"

    @property
    def _name(self) -> str:
        return f"synchronizer={self.synchronizer}{' with matching=true' if self.matching else ''}"

    def _refuse_others(self) -> None:
        """An option of another synchronizer would be swallowed without a word."""
        known = {name for names in _OF.values() for name in names}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in known - set(_OF.get(self.synchronizer, ())) and value != field.default:
                whose = " or ".join(name for name, names in _OF.items() if field.name in names)
                remedy = _INSTEAD.get((field.name, self.synchronizer), "leave it out").format(value)
                raise ConfigError(
                    f"{field.name}={value!r} is an option of synchronizer={whose}, and this run has "
                    f"synchronizer={self.synchronizer}; {remedy}"
                )


def checked_launch(launch: dict[str, Any], strategy: str) -> dict[str, Any]:
    """What is no option of ours must be Lightning's; a misspelt one would be swallowed without a word."""
    unknown = [name for name in launch if name not in _LAUNCH]
    if unknown:
        ours = ", ".join(field.name for field in fields(UnevenSettings))
        raise ConfigError(f"{unknown[0]}={launch[unknown[0]]!r} is no option of {strategy}; it has {ours}")
    return launch
