"""A lab's network, made and removed; and the processes inside. layout -> *namespaces* -> lab."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pl_pipe.cluster.rehearsed import Link
from pl_pipe.errors import LabError
from pl_pipe.lab import shaping
from pl_pipe.lab.layout import BRIDGE, INTERFACE, Layout, is_a_labs
from pl_pipe.lab.tools import run, run_batch

FOLDER = Path("/run/netns")
"""Where `ip` keeps namespaces."""
_KILLED_WITHIN_S = 10.0


def build(layout: Layout, links: Mapping[str, Link], inside: Link) -> None:
    """Makes the namespaces, joins them and shapes their links. What there is after an error, `remove` removes."""
    for namespace in layout.namespaces:
        run("ip", "netns", "add", namespace)
    run_batch("ip", layout.switch, ["link set lo up", f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
    for host in layout.hosts:
        run_batch(
            "ip",
            layout.namespace(host),
            [
                f"link add {INTERFACE} type veth peer name {host} netns {layout.switch}",
                f"address add {layout.address(host)}/24 dev {INTERFACE}",
                "link set lo up",
                f"link set {INTERFACE} up",
            ],
        )
    ports = [f"link set {host} master {BRIDGE}" for host in layout.hosts]
    run_batch("ip", layout.switch, [*ports, *(f"link set {host} up" for host in layout.hosts)])
    for host in layout.hosts:
        own = shaping.commands(links[host], device=INTERFACE)
        run_batch("tc", layout.namespace(host), [*own, *shaping.commands(inside, device="lo", whole=True)])
    run_batch(
        "tc", layout.switch, [line for host in layout.hosts for line in shaping.commands(links[host], device=host)]
    )


def shape(layout: Layout, host: str, link: Link, *, before: Link) -> None:
    """Changes a host's link while it is used, both ways; one that is refused half-way is as before."""
    ends = ((layout.namespace(host), INTERFACE), (layout.switch, host))
    try:
        for namespace, device in ends:
            run_batch("tc", namespace, shaping.commands(link, device=device, before=before))
    except BaseException:
        for namespace, device in ends:
            with suppress(LabError):  # there may be nothing to delete
                run_batch("tc", namespace, [shaping.cleared(device)])
            run_batch("tc", namespace, shaping.commands(before, device=device))
        raise


def remove(layout: Layout, *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Ends what runs in the lab's namespaces, then deletes them. Namespaces of any other name are never touched."""
    present = [name for name in layout.namespaces if is_a_labs(name) and (FOLDER / name).exists()]
    end_processes(present, grace_s=grace_s, hurry=hurry)
    for namespace in present:
        with suppress(LabError):  # another command may have removed it meanwhile
            run("ip", "netns", "delete", namespace)
    left = [name for name in present if (FOLDER / name).exists()]
    if left:
        raise LabError(f"namespace {left[0]} cannot be deleted; try ip netns delete {left[0]}")


def end_processes(namespaces: Iterable[str], *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Asks every process in the namespaces to end, and kills those that have not within `grace_s`."""
    places = list(namespaces)
    _signal(processes_in(places), signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while processes_in(places) and time.monotonic() < deadline_s and not hurry():
        time.sleep(0.05)
    deadline_s = time.monotonic() + _KILLED_WITHIN_S
    while left := processes_in(places):
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {left} of the lab do not end, not even when killed; look what they wait for")
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)


def end_some(pids: Iterable[int], namespaces: Iterable[str], *, grace_s: float) -> None:
    """Ends those of the processes that are in the namespaces: ids of others that have ended may be anybody's now."""
    wanted, places = set(pids), list(namespaces)
    deadline_s = time.monotonic() + grace_s
    _signal(wanted.intersection(processes_in(places)), signal.SIGTERM)
    while left := wanted.intersection(processes_in(places)):
        if time.monotonic() > deadline_s + _KILLED_WITHIN_S:
            raise LabError(f"processes {sorted(left)} do not end, not even when killed; look what they wait for")
        if time.monotonic() > deadline_s:
            _signal(left, signal.SIGKILL)
        time.sleep(0.02)


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Ids of the live processes whose network is one of these namespaces."""
    wanted = set()
    for name in namespaces:
        with suppress(FileNotFoundError):
            wanted.add((FOLDER / name).stat().st_ino)
    found = []
    for process in Path("/proc").iterdir() if wanted else ():
        if process.name.isdigit():
            with suppress(OSError):  # it has ended, or is a zombie
                if (process / "ns" / "net").stat().st_ino in wanted:
                    found.append(int(process.name))
    return found


def transferred(namespace: str, device: str = INTERFACE) -> tuple[int, int]:
    """Bytes that a host has sent and received over its link."""
    (entry,) = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device))
    counts = entry["stats64"]
    return int(counts["tx"]["bytes"]), int(counts["rx"]["bytes"])


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
