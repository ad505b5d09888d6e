"""Names and addresses of a lab's parts. rehearsed cluster -> *layout* -> namespaces, launchers.

    plpipe-3f9a2c-host0            plpipe-3f9a2c-switch              plpipe-3f9a2c-host1
      eth0 10.77.0.1 ════════════ host0 ─ bridge0 ─ host1 ════════════ eth0 10.77.0.2

Each host is a network namespace, and so is the switch: nothing of a lab stands in the machine's own network, every lab
may have the same addresses, and deleting the namespaces deletes it all.
"""

import os
import re
from dataclasses import dataclass

from pl_pipe.cluster.rehearsed import MOST_HOSTS

INTERFACE = "eth0"
"""Of every host."""
BRIDGE = "bridge0"
_PREFIX = "plpipe"
_SUBNET = "10.77.0"
_FIRST_TRAFFIC_PORT = 20000
_NAMESPACE = re.compile(rf"{_PREFIX}-[0-9a-f]+-(host\d+|spectator\d+|switch)")


@dataclass(frozen=True)
class Layout:
    """Where each host of a lab is."""

    lab: str
    hosts: tuple[str, ...]
    """All of them, spectators included."""

    @property
    def switch(self) -> str:
        """The namespace that joins the hosts."""
        return f"{_PREFIX}-{self.lab}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (*(self.namespace(host) for host in self.hosts), self.switch)

    def namespace(self, host: str) -> str:
        return f"{_PREFIX}-{self.lab}-{host}"

    def address(self, host: str) -> str:
        return f"{_SUBNET}.{1 + self.hosts.index(host)}"

    def traffic_port(self, source: str, target: str) -> int:
        """Where the target listens for this flow: below the ports that the kernel hands out."""
        return _FIRST_TRAFFIC_PORT + MOST_HOSTS * self.hosts.index(source) + self.hosts.index(target)


def new_name() -> str:
    return os.urandom(3).hex()


def is_a_labs(namespace: str) -> bool:
    """Whether a namespace's name is one that labs give."""
    return _NAMESPACE.fullmatch(namespace) is not None
