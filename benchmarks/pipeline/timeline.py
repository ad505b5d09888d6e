"""The picture of a pipeline beside its prediction: layers that only sleep, so that the stages do not compete for cores.

    python benchmarks/pipeline/timeline.py              # four stages, `pipedream`; files in ./timeline

    python benchmarks/pipeline/timeline.py --schedules pipedream pipedream_2bw 1f1b gpipe --out /tmp/timelines

Stage s sleeps 30 + 5 s ms in forward and twice that in backward for a batch, a micro-batch its share. The profiler
measures them first, as it does for `plan=auto`; the prediction is the simulator's, on what it measured. The second of
two epochs is recorded, since the first batches of a run take longer. One line a schedule: the time between
mini-batches, measured and predicted, over the second half of the epoch. The first command draws
docs/images/timeline.png.
"""

import argparse
import shutil
from pathlib import Path

import torch
from efficiency import Sleeper, Work, batch_ends
from ranks import busy, prepare, run_ranks

from pl_pipe.callbacks import PipelineTimeline
from pl_pipe.report.comparison import summary
from pl_pipe.report.measured_run import read_run
from pl_pipe.strategies import PipeDreamStrategy

FORWARD_S, MORE_S = 0.030, 0.005


def record(work: Work, schedule: str, folder: str) -> None:
    """What every rank does: later stages sleep longer."""
    torch.manual_seed(0)
    naps = [FORWARD_S + MORE_S * stage for stage in range(work.stages)]
    batch_ends(
        [Sleeper(Work(1, nap, 2 * nap, work.batches)) for nap in naps],
        work.batches,
        devices=work.stages,
        strategy=PipeDreamStrategy(plan="straight", schedule=schedule, timeout_s=60),
        epochs=2,
        callbacks=[PipelineTimeline(folder, batches=work.batches, skip=work.batches)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--schedules", nargs="*", default=("pipedream",))
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("timeline"))
    arguments = parser.parse_args()
    cache = arguments.out.resolve() / "profiles"
    prepare(PL_PIPE_CACHE=str(cache))
    work = Work(arguments.stages, 0.0, 0.0, arguments.batches)
    print(f"{busy()}\n")
    for schedule in arguments.schedules:
        folder = arguments.out.resolve() / schedule
        run_ranks(record, work.stages, work, schedule, str(folder))
        print(f"{schedule}: {summary(read_run(folder / 'timeline.json'))}", flush=True)
    shutil.rmtree(cache)


if __name__ == "__main__":
    main()
