"""The coordinator under load: many clients (threads) over a real store; round trips, requests lost, memory.

python benchmarks/hetero/coordinator.py --clients 64 --rounds 100000
"""

import argparse
import statistics
import threading
import time

import psutil
import torch.distributed as dist

from pl_pipe.comm.coordination import Coordinator, CoordinatorClient, StoreMailbox
from pl_pipe.grouping import GroupRules


def round_trips_s(count: int) -> list[float]:
    """One client alone: nobody to wait for, so that a decision takes as long as its messages."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = Coordinator(StoreMailbox("trips", store), {"all": [0]})
    coordinator.start()
    client, found = CoordinatorClient(StoreMailbox("trips", store), 0), []
    for _ in range(count):
        start_s = time.perf_counter()
        client.group()
        found.append(time.perf_counter() - start_s)
    coordinator.close()
    return found


def under_load(clients: int, rounds: int) -> None:
    """A round is a group's decision; memory is read ten times on the way."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rules = GroupRules(longest_wait_s=0.002, pairs_above=8)
    coordinator = Coordinator(StoreMailbox("load", store), {"all": range(clients)}, rules=rules)
    coordinator.start()
    answered, begun, stop = [0] * clients, [0] * clients, threading.Event()

    def work(worker: int) -> None:
        client = CoordinatorClient(StoreMailbox("load", store), worker)
        while not stop.is_set():
            begun[worker] += 1
            assert worker in client.group().members
            answered[worker] += 1
        client.leave()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(clients)]
    start_s, process = time.perf_counter(), psutil.Process()
    for thread in threads:
        thread.start()
    for share in range(1, 11):
        while coordinator.groups.count < rounds * share // 10:
            time.sleep(0.2)
        print(f"  {coordinator.groups.count:>8,} rounds   {process.memory_info().rss / 2**20:8.1f} MiB", flush=True)
    stop.set()
    for thread in threads:
        thread.join(30)
    took_s = time.perf_counter() - start_s
    lost = sum(begun) - sum(answered)
    print(f"  {sum(answered) / took_s:,.0f} requests/s, {coordinator.groups.count / took_s:,.0f} rounds/s, {lost} lost")
    coordinator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--trips", type=int, default=3000)
    options = parser.parse_args()
    trips = sorted(round_trips_s(options.trips))
    print(
        f"round trip of a decision: median {statistics.median(trips) * 1e3:.2f} ms, "
        f"99 % {trips[int(len(trips) * 0.99)] * 1e3:.2f} ms"
    )
    print(f"{options.clients} clients:")
    under_load(options.clients, options.rounds)


if __name__ == "__main__":
    main()
