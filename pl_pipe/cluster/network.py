"""Which network interface the processes of a run speak over."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pl_pipe.cluster.rehearsed import LabConfig
from pl_pipe.errors import ConfigError


@dataclass
class ClusterConfig:
    """The machines of a run, as far as they must be told."""

    interface: str | None = None
    """Network interface for gloo and NCCL, such as `eth0`; null lets them choose by the host's name."""
    devices: int | None = None
    """For planning: workers that all see each other alike."""
    bandwidth: float | None = None
    """For planning with `devices`: bytes a second between two of them; null is 1.25e9, which is 10 Gbit/s."""
    latency_s: float = 0.0
    levels: Any = None
    """For planning: `[[4, 1.25e10], [2, 1.25e9]]` is 2 hosts of 4 workers, with 1.25e10 bytes/s inside a host."""
    path: str | None = None
    """For planning: a `cluster.json` that `pl-pipe probe` wrote."""
    lab: LabConfig | None = None
    """Hosts that `pl-pipe lab` rehearses on one machine; for planning, their links as declared."""


def network_environment(config: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo and NCCL use `config.interface`; a variable the user has set already wins."""
    if config.interface is None:
        return {}
    known = sorted(name for _, name in socket.if_nameindex())
    if config.interface not in known:
        raise ConfigError(
            f"cluster.interface={config.interface} is not a network interface of this machine; "
            f"choose one of {', '.join(known)}"
        )
    wanted = {"GLOO_SOCKET_IFNAME": config.interface, "NCCL_SOCKET_IFNAME": config.interface}
    return {name: value for name, value in wanted.items() if name not in environ}
