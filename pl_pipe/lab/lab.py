"""A cluster rehearsed on this machine: set up, changed while it runs, removed. rehearsed cluster -> *Lab* -> commands.

with Lab(LabConfig(hosts=2, between=LinkConfig(rate="1gbit"))) as lab:
    server = lab.start("host0", ["python", "serve.py"])
    lab.set_link("host1", LinkConfig(rate="100mbit"))
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from pl_pipe.cluster.link_text import is_no_rate
from pl_pipe.cluster.rehearsed import (
    Flow,
    LabConfig,
    Link,
    LinkConfig,
    RehearsedCluster,
    check_ends,
    check_host,
    checked_flow,
)
from pl_pipe.errors import ConfigError, LabError
from pl_pipe.lab import namespaces, state, traffic
from pl_pipe.lab.interruption import deferred, end_with_parent, ending_by_exception, undisturbed
from pl_pipe.lab.layout import Layout, new_name
from pl_pipe.lab.state import LabState, Owner, RunningFlow
from pl_pipe.lab.tools import check_machine
from pl_pipe.log import get_logger

log = get_logger(__name__)

GRACE_S = 5.0
"""What processes have to end by themselves when their lab is removed."""
_TRAFFIC_ENDS_S, _TRAFFIC_STARTS_S = 2.0, 30.0


class Lab:
    """One lab. It is removed when the block ends that it is used in, or by `down`.

    Within the block SIGTERM and SIGHUP raise SystemExit, unless the program handles them itself: then too the lab is
    removed. (Only in the main thread: Python has no signals elsewhere.)
    """

    def __init__(self, cluster: LabConfig | RehearsedCluster, *, kept: bool = False) -> None:
        """
        Args:
            cluster: the hosts and links.
            kept: it stands until `down`, also when this process has ended.
        """
        found = cluster if isinstance(cluster, RehearsedCluster) else RehearsedCluster.of(cluster)
        self._wanted_flows = found.traffic
        self._state = LabState(
            lab=new_name(),
            hosts=found.hosts,
            spectators=found.spectators,
            devices_per_host=found.devices_per_host,
            links=found.links,
            inside=found.inside,
            owner=None if kept else Owner.this_process(),
        )

    @classmethod
    def open(cls, name: str | None = None) -> "Lab":
        """A lab that stands, by name, or the only one."""
        lab = cls.__new__(cls)
        lab._state, lab._wanted_flows = state.find(name), ()
        return lab

    @property
    def name(self) -> str:
        return self._state.lab

    @property
    def layout(self) -> Layout:
        return self._state.layout

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those that train."""
        return self._state.hosts

    @property
    def devices_per_host(self) -> int:
        return self._state.devices_per_host

    def __enter__(self) -> "Lab":
        with ExitStack() as signals:
            signals.enter_context(ending_by_exception())
            with self.removed_on_error():
                self.up()
            self._signals = signals.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._signals:
            self.down()

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.down()
            raise

    def up(self) -> None:
        """Sets it up. It is noted before anything is made, so that whatever happens it can be found and removed."""
        check_machine()
        state.write(self._state)
        namespaces.build(self.layout, self._state.links, self._state.inside)
        for flow in self._wanted_flows:
            self._add_flow(flow, ends_with_owner=self._state.owner is not None)

    def down(self, *, grace_s: float = GRACE_S) -> None:
        """Ends its processes and removes it; once is enough, twice does no harm."""
        with undisturbed() as hurry:
            namespaces.remove(self.layout, grace_s=grace_s, hurry=hurry)
            with state.locked(give_up=hurry):  # a command that changes it meanwhile would write it down again
                state.forget(self.name)

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        ends_with_owner: bool = True,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host, in a session of its own; `options` are those of `subprocess.Popen`."""
        check_host(host, self.layout.hosts, name="the command")
        with deferred():
            return subprocess.Popen(
                ["ip", "netns", "exec", self.layout.namespace(host), *command],
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()) if ends_with_owner else None,
                **options,
            )

    def set_link(self, host: str, changes: LinkConfig) -> Link:
        """Changes a host's link; what is not given stays as it is."""
        with state.locked():
            self._reread()
            check_host(host, self.layout.hosts, name="set-link")
            before = self._state.links[host]
            link = Link.of(changes, name=host, otherwise=before)
            namespaces.shape(self.layout, host, link, before=before)
            self._state = self._state.with_link(host, link)
            state.write(self._state)
        return link

    def set_traffic(self, source: str, target: str, rate: str, *, ends_with_owner: bool = True) -> Flow | None:
        """Starts traffic from one host to another, or changes its rate; a rate of 0 ends it."""
        wanted = None
        known = self.layout.hosts
        check_ends(source, target, known, name="traffic")
        if not is_no_rate(rate):
            wanted = checked_flow(source, target, rate, known, name="traffic")
        with state.locked():
            self._reread()
            there = [entry for entry in self._state.flows if (entry.flow.source, entry.flow.target) == (source, target)]
            if wanted is None and not there:
                flowing = ", ".join(str(entry.flow) for entry in self._state.flows) or "none"
                raise ConfigError(f"there is no traffic from {source} to {target} to end; the lab's traffic: {flowing}")
            pids = [pid for entry in there for pid in entry.pids]
            namespaces.end_some(pids, self.layout.namespaces, grace_s=_TRAFFIC_ENDS_S)  # they have the port
            kept = tuple(entry for entry in self._state.flows if entry not in there)
            self._state = replace(self._state, flows=kept)
            state.write(self._state)
            if wanted is not None:
                self._add_flow(wanted, ends_with_owner=ends_with_owner)
        return wanted

    def transferred(self) -> dict[str, tuple[int, int]]:
        """Bytes sent and received by each host over its link."""
        return {host: namespaces.transferred(self.layout.namespace(host)) for host in self.layout.hosts}

    def _reread(self) -> None:
        """Other commands may have changed it."""
        self._state = state.find(self.name)

    def _add_flow(self, flow: Flow, *, ends_with_owner: bool) -> None:
        """Starts the receiver, and when it listens the sender. Their errors are kept beside the state."""
        address, port = self.layout.address(flow.target), str(self.layout.traffic_port(flow.source, flow.target))
        program = [sys.executable, "-I", traffic.__file__]
        with state.traffic_log(self.name).open("ab") as log:
            options: dict[str, Any] = {"ends_with_owner": ends_with_owner, "stdin": subprocess.DEVNULL, "stderr": log}
            receiver = self.start(flow.target, [*program, "receive", address, port], stdout=subprocess.PIPE, **options)
            if not _listens(receiver):
                receiver.kill()
                receiver.wait()
                said = state.traffic_log(self.name).read_text(errors="replace").strip().splitlines()
                raise LabError(
                    f"traffic {flow} does not start: {said[-1] if said else 'its receiver said nothing'}; see "
                    f"pl-pipe lab exec {flow.target} -- ss -tlnp for who has port {port}"
                )
            try:
                sender = self.start(
                    flow.source, [*program, "send", address, port, str(flow.rate)], stdout=subprocess.DEVNULL, **options
                )
            except BaseException:
                receiver.kill()
                raise
        running = RunningFlow(flow, (sender.pid, receiver.pid))
        self._state = replace(self._state, flows=(*self._state.flows, running))
        state.write(self._state)


def remove_abandoned() -> list[str]:
    """Removes labs whose owner has died without doing so; gives their names."""
    removed = []
    for entry in state.labs():
        if entry.abandoned:
            try:
                Lab.open(entry.lab).down(grace_s=1.0)
                removed.append(entry.lab)
            except LabError as error:
                if entry.lab in {other.lab for other in state.labs()}:  # else another command removed it meanwhile
                    log.warning("lab %s, whose owner has died, cannot be removed: %s", entry.lab, error)
    return removed


def _listens(receiver: subprocess.Popen[Any]) -> bool:
    assert receiver.stdout is not None
    with receiver.stdout as said:
        return bool(select.select([said], [], [], _TRAFFIC_STARTS_S)[0]) and bool(said.readline())
