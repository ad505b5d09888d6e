"""How long a message takes there and back between every two ranks. process group -> *latencies* -> spanning tree."""

import statistics
import time
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 5


def measure_latencies(group: Any, *, rounds: int = ROUNDS) -> list[list[float]]:
    """Half of the median round trip, by pair; all ranks of the gloo group must ask at the same point, and all learn."""
    ranks = dist.get_process_group_ranks(group)
    mine = ranks.index(dist.get_rank())
    own_s = torch.zeros(len(ranks), dtype=torch.float64)
    number = torch.zeros(1)
    for one, other in combinations(range(len(ranks)), 2):
        if mine not in (one, other):
            continue
        peer = ranks[other if mine == one else one]
        trips_s = []
        for _ in range(rounds + 1):
            begin_s = time.perf_counter()
            if mine == one:
                dist.send(number, peer, group=group)
                dist.recv(number, peer, group=group)
            else:
                dist.recv(number, peer, group=group)
                dist.send(number, peer, group=group)
            trips_s.append(time.perf_counter() - begin_s)
        if mine == one:
            own_s[other] = statistics.median(trips_s[1:]) / 2  # the first may have set up the connection
    halves_s = torch.zeros(len(ranks), len(ranks), dtype=torch.float64)
    halves_s[mine] = own_s
    dist.all_reduce(halves_s, group=group)
    found: list[list[float]] = (halves_s + halves_s.t()).tolist()
    return found
