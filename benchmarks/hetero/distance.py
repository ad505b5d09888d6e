"""HetPipe's clock distance over long random runs: workers as threads over a real store, waits and departures by chance.

python benchmarks/hetero/distance.py --waves 20000
"""

import argparse
import random
import threading
import time

import torch.distributed as dist

from pl_pipe.comm.coordination import Coordinator, CoordinatorClient, StoreMailbox


def widest(workers: int, distance: int, waves: int, seed: int) -> tuple[int, int]:
    """The largest distance that was met, and by how much each worker's count differed at most."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = Coordinator(StoreMailbox("waves", store), {"all": range(workers)}, distance=distance)
    coordinator.start()
    done, spread = [0] * workers, [0]

    def work(worker: int) -> None:
        client, draw = CoordinatorClient(StoreMailbox("waves", store), worker), random.Random(f"{seed}/{worker}")
        for _ in range(waves):
            if draw.random() < 0.05:
                time.sleep(draw.uniform(0.0, 0.002))
            assert client.tick() <= distance
            done[worker] += 1
            spread[0] = max(spread[0], done[worker] - min(done))
        client.leave()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.close()
    return coordinator.widest, spread[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=5000)
    options = parser.parse_args()
    for workers, distance in ((2, 0), (4, 1), (8, 3)):
        met, seen = widest(workers, distance, options.waves, 0)
        # A worker may have handed in one more wave than it has been let go after.
        print(
            f"{workers} workers, D={distance}, {options.waves} waves each: distance {met} at most, counts {seen} apart"
        )
        assert met <= distance, "the bound was broken"


if __name__ == "__main__":
    main()
