"""From what a user writes to a topology. setting -> *choice* -> topology."""

import re
from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import Any

from pl_pipe.comm.topology.shapes import SHAPES, star
from pl_pipe.comm.topology.spanning_tree import minimum_spanning_tree
from pl_pipe.comm.topology.trees import NATIVE, SumTree, Topology, checked_fathers
from pl_pipe.errors import ConfigError

AUTO, SPANNING_TREE = "auto", "minimum_spanning_tree"
NAMES = (*SHAPES, SPANNING_TREE, AUTO)

Setting = str | Sequence[int]
_ROOTED = re.compile(r"star@(\d+)")
_MOST_STARS = 8
"""Roots that are tried, where every rank could be one."""


def checked_setting(setting: Setting) -> str | tuple[int, ...]:
    """What can be checked before the ranks are there."""
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        given: list[Any] = list(setting)
        if not all(isinstance(father, Integral) and not isinstance(father, bool) for father in given):
            raise ConfigError(f"topology={given} is no array of fathers; give a whole number for each rank")
        fathers = [int(father) for father in given]
        return checked_fathers(fathers, len(fathers))
    if not isinstance(setting, str) or (setting not in NAMES and not _ROOTED.fullmatch(setting)):
        raise ConfigError(
            f"topology={setting} is unknown; choose one of {', '.join(NAMES)}, star@RANK, or an array of fathers such "
            f"as [0,0,0,1]"
        )
    return setting


def topology_of(
    setting: Setting, hosts: Sequence[Hashable], *, latencies_s: Sequence[Sequence[float]] | None = None
) -> Topology:
    """The topology for ranks on these hosts; not for `auto`, which has to be measured."""
    wanted = checked_setting(setting)
    if isinstance(wanted, tuple):
        return Topology("fathers", len(hosts), (SumTree.both_ways(checked_fathers(wanted, len(hosts))),))
    if wanted == SPANNING_TREE:
        if latencies_s is None:
            raise ConfigError(f"topology={SPANNING_TREE} needs measured latencies, and there are none; measure them")
        return minimum_spanning_tree(latencies_s)
    rooted = _ROOTED.fullmatch(wanted)
    if rooted is not None:
        root = int(rooted[1])
        if root >= len(hosts):
            raise ConfigError(f"topology={wanted}, but there are {len(hosts)} ranks; choose a root below that")
        return star(hosts, root=root)
    return SHAPES[wanted](hosts)


def candidates(hosts: Sequence[Hashable]) -> list[Topology]:
    """What there is to choose from, without two that send the same messages."""
    step = -(-len(hosts) // _MOST_STARS)
    found = [SHAPES[name](hosts) for name in (NATIVE, "ring", "clique")]
    found += [star(hosts, root=root) for root in range(0, len(hosts), step)]
    found += [SHAPES[name](hosts) for name in ("tree", "binary_tree_star", "multi_binary_tree_star", "binary_tree")]
    return list({topology.digest(): topology for topology in reversed(found)}.values())[::-1]
