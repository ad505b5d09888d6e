"""Which network interface the processes of a run speak over."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pl_pipe.errors import ConfigError


@dataclass
class ClusterConfig:
    """The machines of a run, as far as they must be told."""

    interface: str | None = None
    """Network interface for gloo and NCCL, such as `eth0`; null lets them choose by the host's name."""


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
