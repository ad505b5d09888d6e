"""What a strategy demands of the machine, checked before any process is started."""

from dataclasses import dataclass, field

from pl_pipe.errors import ConfigError


@dataclass
class StrategyAbout:
    """A strategy's introduction and its demands. Part of its configuration, never passed to the strategy itself."""

    summary: str = ""
    example: str = ""
    """Overrides that make a good first try."""
    max_devices: int | None = None
    """The most processes it can use; null is any number."""
    accelerators: list[str] = field(default_factory=lambda: ["cpu", "cuda"])


@dataclass(frozen=True)
class Hardware:
    """What the trainer was told to use, resolved."""

    accelerator: str
    """`cpu` or `cuda`, or another accelerator's name."""
    devices: int
    """Processes on each node."""
    num_nodes: int = 1

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


def check_requirements(
    name: str, about: StrategyAbout, hardware: Hardware, *, fewer: str = "set trainer.devices=1"
) -> None:
    """Refuses a strategy that cannot run on `hardware`.

    Args:
        fewer: how to have a single device.
    """
    if hardware.accelerator not in about.accelerators:
        wanted = " or ".join(about.accelerators)
        raise ConfigError(
            f"strategy={name} runs on {wanted}, this run is on {hardware.accelerator}; "
            f"set trainer.accelerator={about.accelerators[0]} or choose another strategy (strategy=ddp)"
        )
    if about.max_devices is not None and hardware.world_size > about.max_devices:
        raise ConfigError(
            f"strategy={name} trains on {about.max_devices} device, this run has {hardware.devices} "
            f"on each of {hardware.num_nodes} node(s); {fewer}, or choose a strategy for several "
            f"(strategy=ddp, strategy=pipedream)"
        )
