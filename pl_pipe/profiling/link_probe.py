"""Measures the links between the ranks of a job. process group -> *link probe* -> link report -> cluster.json.

Every rank runs the same steps, one after another; whoever has no part in a step waits at the barrier that ends it:

    step      rank 0        rank 1        rank 2
    0, 1      ping ◄──────► pong          wait
    0, 2      ping ◄────────wait────────► pong
    1, 2      wait          ping ◄──────► pong
    all       all-reduce ◄► all-reduce ◄► all-reduce
"""

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from pl_pipe.errors import ConfigError
from pl_pipe.profiling.link_report import AllReduceTimings, LinkReport, PairTimings, Timing
from pl_pipe.profiling.link_timing import Effort, Group, Row, Wire, all_reduces, ping, pong

SIZES_BYTES = tuple(4096 * 4**step for step in range(8))
"""4 KiB to 64 MiB."""
REPEATS = 30
"""Round trips of a small message; large ones make do with fewer."""
PAIR_BUDGET_S = 0.75
"""What one pair may take: four local ranks take six seconds in all, eight some twenty."""
TIMEOUT_S = 30.0
"""How long a rank waits for another one in any one step, all of which are shorter."""
ALL_PAIRS_UP_TO = 8
"""Ranks up to which every pair is measured."""
SAMPLE = 48
"""Pairs of each kind that are measured above that."""

_NAME_BYTES = 256
_NAMESPACE = Path("/proc/self/ns/net")

Progress = Callable[[int, int, str], None]
"""Told before each step: steps done, steps in all, and what comes now."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    hostname: str
    namespace: str
    """Of its network; empty where the system has none."""


def measure_links(
    *,
    sizes: Sequence[int] = SIZES_BYTES,
    repeats: int = REPEATS,
    device: str = "cpu",
    pair_budget_s: float = PAIR_BUDGET_S,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> LinkReport:
    """Measures the links of the default process group. Every rank calls it alike, and gets the same report.

    `pair_budget_s` bounds the time for one pair, and all-reduces get twice as much. `timeout_s` is that of the
    groups made here; the default group has its own.
    """
    effort = Effort(tuple(sizes), repeats, pair_budget_s)
    _check_backend(device)
    rank = dist.get_rank()
    tell = progress or _untold
    wire = Wire(device, effort.sizes_bytes[-1])
    with _everyone(wire, timeout_s) as everyone:
        hosts = distinct_hosts(_places(everyone))
        pairs, groups = pairs_to_measure(hosts), groups_to_reduce(hosts)
        total = len(pairs) + min(len(groups), 2)

        pair_rows: dict[int, list[Row]] = {}
        for step, (first, second) in enumerate(pairs):
            tell(step, total, f"{'' if rank in (first, second) else 'waiting for '}ranks {first} and {second}")
            if rank == first:
                pair_rows[step] = ping(wire, everyone, second, effort)
            elif rank == second:
                pong(wire, everyone, first)
            dist.barrier(group=everyone.control)

        tell(len(pairs), total, f"all-reduce over {len(hosts)} ranks")
        reduce_rows = {0: all_reduces(wire, everyone, effort)}
        if len(groups) > 1:  # on all hosts at once, as training does it
            tell(total - 1, total, "all-reduce within each host")
            with _own_host(groups[1:], wire, timeout_s) as (own, group):
                reduce_rows[1 + own] = all_reduces(wire, group, effort)
        reduce_rows = {number: rows for number, rows in reduce_rows.items() if groups[number][0] == rank}

        pair_timings = _shared(pair_rows, len(pairs), effort, everyone)
        reduce_timings = _shared(reduce_rows, len(groups), effort, everyone)
        dist.barrier(group=everyone.control)
    tell(total, total, "done")
    return LinkReport(
        hosts=tuple(hosts),
        backend=dist.get_backend(),
        device=device,
        torch_version=torch.__version__,
        pairs=tuple(PairTimings(ranks, timings) for ranks, timings in zip(pairs, pair_timings, strict=True)),
        all_reduces=tuple(AllReduceTimings(*entry) for entry in zip(groups, reduce_timings, strict=True)),
    )


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs of up to eight ranks; above that up to 48 of each of these kinds, evenly taken:

    - neighbours in number, which rings and pipelines use (ranks 0 and 1 are always among them);
    - the first ranks of every two hosts;
    - pairs by chance, the same in every run.
    """
    ranks = range(len(hosts))
    if len(hosts) <= ALL_PAIRS_UP_TO:
        return list(combinations(ranks, 2))
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    chance = random.Random(0)
    kinds = [
        [(rank, rank + 1) for rank in ranks[:-1]] + [(0, ranks[-1])],
        list(combinations(firsts, 2)),
        [(min(drawn), max(drawn)) for drawn in (chance.sample(ranks, 2) for _ in range(SAMPLE))],
    ]
    return sorted({pair for kind in kinds for pair in kind[:: max(1, -(-len(kind) // SAMPLE))]})


def groups_to_reduce(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks; and the ranks of each host, where there are several hosts with several ranks each."""
    everyone = tuple(range(len(hosts)))
    within = [tuple(rank for rank in everyone if hosts[rank] == host) for host in dict.fromkeys(hosts)]
    several = len(within) > 1 and all(len(ranks) > 1 for ranks in within)
    return [everyone, *within] if several else [everyone]


def distinct_hosts(places: Sequence[Place]) -> list[str]:
    """A name for each rank's host: the host name, with its namespace where ranks of one name have several."""
    namespaces: dict[str, set[str]] = {}
    for place in places:
        namespaces.setdefault(place.hostname, set()).add(place.namespace)
    return [
        place.hostname if len(namespaces[place.hostname]) == 1 else f"{place.hostname}/{place.namespace}"
        for place in places
    ]


def _untold(done: int, total: int, doing: str) -> None:
    """Progress that nobody asked for."""


def _check_backend(device: str) -> None:
    if not dist.is_initialized():
        raise ConfigError("links are measured between ranks, but there is no process group; call init_process_group")
    if dist.get_world_size() < 2:
        raise ConfigError(f"a group of {dist.get_world_size()} rank has no link to measure; set trainer.devices=2")
    fitting = "nccl" if device.startswith("cuda") else "gloo"
    if fitting not in dist.get_backend():
        raise ConfigError(
            f"messages on {device} need {fitting}, but the process group speaks {dist.get_backend()}; "
            f"start it with backend={fitting!r}"
        )


@contextmanager
def _everyone(wire: Wire, timeout_s: float) -> Iterator[Group]:
    """The default group, with a gloo group beside it where it speaks NCCL."""
    if not wire.cuda:
        yield Group(None, None)
        return
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    yield Group(None, control)
    dist.destroy_process_group(control)


@contextmanager
def _own_host(hosts: list[tuple[int, ...]], wire: Wire, timeout_s: float) -> Iterator[tuple[int, Group]]:
    """The number and group of this rank's host; all ranks make the groups of all hosts, as torch wants it."""
    timeout = timedelta(seconds=timeout_s)
    data = [dist.new_group(list(ranks), timeout=timeout) for ranks in hosts]
    control = [dist.new_group(list(ranks), timeout=timeout, backend="gloo") for ranks in hosts] if wire.cuda else data
    own = next(number for number, ranks in enumerate(hosts) if dist.get_rank() in ranks)
    yield own, Group(data[own], control[own])
    for group in {id(group): group for group in (data[own], control[own])}.values():
        dist.destroy_process_group(group)


def _places(group: Group) -> list[Place]:
    """Where each rank runs. Fixed-size tensors carry the names: nothing pickled crosses a socket."""
    namespace = str(_NAMESPACE.readlink()) if _NAMESPACE.is_symlink() else ""
    text = f"{socket.gethostname()[:128]}\n{namespace}".encode()[:_NAME_BYTES]
    mine = torch.tensor(list(text.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine, group=group.control)
    return [Place(*bytes(part.tolist()).rstrip(b"\0").decode().split("\n")) for part in parts]


def _shared(rows: dict[int, list[Row]], count: int, effort: Effort, group: Group) -> list[tuple[Timing, ...]]:
    """Everyone's rows: each rank brings its own, and zeros for the others'. Sizes left out have no repeats."""
    table = torch.zeros(count, len(effort.sizes_bytes), 4, dtype=torch.float64)
    for number, own in rows.items():
        table[number, : len(own)] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(table, group=group.control)
    return [
        tuple(
            Timing(size_bytes, median_s, low_s, high_s, int(repeats))
            for size_bytes, (median_s, low_s, high_s, repeats) in zip(effort.sizes_bytes, entry, strict=True)
            if repeats
        )
        for entry in table.tolist()
    ]
