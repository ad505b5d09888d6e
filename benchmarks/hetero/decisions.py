"""How many groups a second the group former decides on, by the number of workers; one thread, no messages."""

import argparse
import heapq
import random
import statistics
import time

from pl_pipe.grouping import GroupFormer, GroupRules


def decisions_per_s(workers: int, arrivals: int, seed: int) -> float:
    """Workers arrive after steps of random length; the clock is simulated, the decisions are timed."""
    draw = random.Random(seed)
    former = GroupFormer(range(workers), GroupRules())
    coming = [(draw.uniform(0.0, 0.1), worker) for worker in range(workers)]
    heapq.heapify(coming)
    decided, left, began_s = 0, arrivals, time.perf_counter()
    while left:
        deadline_s = former.deadline_s
        if deadline_s is not None and (not coming or deadline_s <= coming[0][0]):
            now_s, groups = deadline_s, former.elapse(deadline_s)
        else:
            now_s, worker = heapq.heappop(coming)
            groups = former.arrive(worker, now_s)
            left -= 1
        decided += len(groups)
        for group in groups:
            for member in group.members:
                heapq.heappush(coming, (now_s + draw.uniform(0.09, 0.11), member))
    return decided / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrivals", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{'workers':>8} {'decisions/s':>12}   spread")
    for workers in (2, 4, 8, 16, 64, 256):
        found = [decisions_per_s(workers, options.arrivals, seed) for seed in range(options.repeats)]
        print(f"{workers:>8} {statistics.median(found):>12,.0f}   {min(found):,.0f} to {max(found):,.0f}")


if __name__ == "__main__":
    main()
