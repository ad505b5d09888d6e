"""A cluster that `pl-pipe lab` rehearses on one machine, as its file describes it. conf/cluster -> *lab* -> plan, lab.

host0 ══ link ═╗                      one link a host, to one switch; `between` says what they are like,
host1 ══ link ═╬═ switch              `links` where one differs, `inside` what ranks of one host speak over
host2 ══ link ═╝
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pl_pipe.cluster.link_text import (
    UNCAPPED,
    format_delay,
    format_loss,
    format_rate,
    parse_cap,
    parse_delay,
    parse_loss,
    parse_rate,
)
from pl_pipe.cluster.topology import Cluster, Level
from pl_pipe.errors import ConfigError

MOST_HOSTS = 64
"""Spectators included: beyond it one machine rehearses nothing."""
UNCAPPED_INSIDE = Level(1, 3e9, all_reduce_factor=3.0)
"""What processes of one machine were measured to give each other over gloo (docs/planning.md)."""
_RING_FACTOR = 2.0
"""Of an all-reduce that only its links hold up."""


@dataclass
class LinkConfig:
    """What a link is like; null leaves it as the machine has it."""

    rate: str | None = None
    """Each way, such as `1gbit`; `uncapped` takes a cap off again."""
    latency: str | None = None
    """One way, such as `200us`. Of two hosts each link adds half of its own."""
    loss: str | None = None
    """Of packets, such as `0.1%`. Of two hosts each link adds half of its own."""


@dataclass
class LabConfig:
    """Hosts on one machine, as network namespaces."""

    hosts: int = 2
    devices_per_host: int = 1
    between: LinkConfig = field(default_factory=LinkConfig)
    """Every host's link to the others."""
    inside: LinkConfig = field(default_factory=LinkConfig)
    """Between ranks of one host: its loopback."""
    links: dict[str, LinkConfig] = field(default_factory=dict)
    """Hosts whose link differs, by name: `{host2: {rate: 100mbit}}`."""
    spectators: int = 0
    """Hosts outside the training, `spectator0` and on, for traffic."""
    traffic: Any = None
    """From the start: `[{from: host1, to: host3, rate: 300mbit}]`."""


@dataclass(frozen=True)
class Link:
    """One link, in numbers."""

    rate: float | None = None
    """Bits a second each way; None is uncapped."""
    latency_s: float = 0.0
    loss: float = 0.0

    @classmethod
    def of(cls, config: LinkConfig, *, name: str, otherwise: "Link | None" = None) -> "Link":
        """The settings in numbers; what they leave out is as in `otherwise`."""
        base = otherwise or cls()
        return cls(
            base.rate if config.rate is None else parse_cap(config.rate, name=f"{name}.rate"),
            base.latency_s if config.latency is None else parse_delay(config.latency, name=f"{name}.latency"),
            base.loss if config.loss is None else parse_loss(config.loss, name=f"{name}.loss"),
        )

    @property
    def disturbed(self) -> bool:
        """Whether it needs more than a rate."""
        return self.latency_s > 0 or self.loss > 0

    def __str__(self) -> str:
        parts = [UNCAPPED if self.rate is None else format_rate(self.rate)]
        if self.latency_s:
            parts.append(f"latency {format_delay(self.latency_s)}")
        if self.loss:
            parts.append(f"loss {format_loss(self.loss)}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Flow:
    """Traffic from one host to another that is none of the training's."""

    source: str
    target: str
    rate: float
    """Bits a second."""

    def __str__(self) -> str:
        return f"{self.source} > {self.target}: {format_rate(self.rate)}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RehearsedCluster:
    """What a lab's settings mean, checked."""

    hosts: tuple[str, ...]
    """That train; ranks are numbered by host."""
    devices_per_host: int
    spectators: tuple[str, ...]
    links: Mapping[str, Link]
    """Of all hosts, spectators included."""
    inside: Link
    traffic: tuple[Flow, ...] = ()

    @classmethod
    def of(cls, config: LabConfig) -> "RehearsedCluster":
        """Refuses what cannot be set up, before anything is."""
        _check_count("hosts", config.hosts, least=1)
        _check_count("devices_per_host", config.devices_per_host, least=1)
        _check_count("spectators", config.spectators, least=0)
        if config.hosts + config.spectators > MOST_HOSTS:
            raise ConfigError(
                f"cluster.lab.hosts={config.hosts} and cluster.lab.spectators={config.spectators} make "
                f"{config.hosts + config.spectators} hosts; one machine rehearses {MOST_HOSTS} at most"
            )
        hosts = tuple(f"host{number}" for number in range(config.hosts))
        spectators = tuple(f"spectator{number}" for number in range(config.spectators))
        between = Link.of(config.between, name="cluster.lab.between")
        links = dict.fromkeys((*hosts, *spectators), between)
        for host, differing in config.links.items():
            check_host(host, links, name="cluster.lab.links")
            links[host] = Link.of(differing, name=f"cluster.lab.links.{host}", otherwise=between)
        flows = [_flow(entry, links) for entry in _entries(config.traffic)]
        pairs = [(flow.source, flow.target) for flow in flows]
        twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
        if twice is not None:
            raise ConfigError(f"cluster.lab.traffic has two entries from {twice[0]} to {twice[1]}; add their rates up")
        return cls(
            hosts,
            config.devices_per_host,
            spectators,
            links,
            Link.of(config.inside, name="cluster.lab.inside"),
            tuple(flows),
        )

    @property
    def everyone(self) -> tuple[str, ...]:
        return (*self.hosts, *self.spectators)

    def levels(self) -> Cluster:
        """What a plan is made for: the links as declared, the slowest host's between hosts; traffic does not count."""
        inside = _level(self.devices_per_host, self.inside.rate, self.inside.latency_s)
        if len(self.hosts) == 1:
            return Cluster((inside,))
        links = [self.links[host] for host in self.hosts]
        capped = [link.rate for link in links if link.rate is not None]
        between = _level(len(self.hosts), min(capped, default=None), max(link.latency_s for link in links))
        return Cluster((between,) if self.devices_per_host == 1 else (inside, between))


def check_host(host: str, known: Sequence[str] | Mapping[str, Any], *, name: str) -> None:
    if host not in known:
        raise ConfigError(f"{name} names {host}, which the lab has not; its hosts are {', '.join(known)}")


def check_ends(source: str, target: str, known: Sequence[str] | Mapping[str, Any], *, name: str) -> None:
    """Of traffic: two hosts of the lab."""
    for host in (source, target):
        check_host(host, known, name=name)
    if source == target:
        raise ConfigError(f"{name} goes from {source} to itself, over no link; name two hosts")


def checked_flow(source: str, target: str, rate: str, known: Sequence[str] | Mapping[str, Any], *, name: str) -> Flow:
    """The flow, if the lab has both of its ends."""
    check_ends(source, target, known, name=name)
    return Flow(source, target, parse_rate(rate, name=f"{name} rate"))


def _level(members: int, rate: float | None, latency_s: float) -> Level:
    """Links of one kind. A cap takes nothing off what the machine itself needs for an all-reduce; below it, the link
    is what an all-reduce waits for."""
    machine = UNCAPPED_INSIDE
    bandwidth = machine.bandwidth if rate is None else min(rate / 8, machine.bandwidth)
    factor = max(_RING_FACTOR, machine.all_reduce_factor * bandwidth / machine.bandwidth)
    return Level(members, bandwidth, latency_s, factor)


def _check_count(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise ConfigError(f"cluster.lab.{name}={value}; give {least} or more")


def _entries(traffic: Any) -> Sequence[Any]:
    if traffic is None:
        return ()
    if not isinstance(traffic, Sequence) or isinstance(traffic, str):
        raise ConfigError(
            f"cluster.lab.traffic={traffic} is no list; give entries such as {{from: host1, to: host3, rate: 300mbit}}"
        )
    return traffic


def _flow(entry: Any, known: Mapping[str, Any]) -> Flow:
    if not isinstance(entry, Mapping) or set(entry) != {"from", "to", "rate"}:
        raise ConfigError(
            f"cluster.lab.traffic has the entry {entry}; give each as {{from: host1, to: host3, rate: 300mbit}}"
        )
    return checked_flow(str(entry["from"]), str(entry["to"]), str(entry["rate"]), known, name="cluster.lab.traffic")
