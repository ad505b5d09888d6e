"""How fast parallel text is read, and that it takes no more memory when there is more of it.

    python benchmarks/data/text_readers.py                       # generated sentences, 200,000 and 2,000,000 pairs
    python benchmarks/data/text_readers.py --source train.en.gz --target train.de.gz

Each size is read by a process of its own, on one core, in four ways:

    lines       both files, line by line
    encode      the same, and encoding by the vocabulary, and writing ids (once a corpus)
    batches     an epoch of bucketed, padded batches from the ids on disk (every epoch of training)
    pretokenised  lines of BPE tokens to ids

`sequences/s` counts sources and targets, for a second of processor time. `grown` is how much the process's own memory
(without mapped files, which the system takes back when it likes) grew while reading.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

WAYS = ("lines", "encode", "batches", "pretokenised")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200_000, 2_000_000], help="pairs to read")
    parser.add_argument("--source", type=Path, help="repeated until there are enough; generated if left out")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(read(**json.loads(options.worker))))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'way':<14}{'pairs':>10}{'sequences/s':>14}  {'(least to most)':<20}{'grown':>10}")
        for size in options.sizes:
            files = write_text(Path(folder), size, options.source, options.target)
            for way in options.ways:
                found = [in_own_process(way=way, size=size, folder=folder, **files) for _ in range(options.repeats)]
                speeds = sorted(2 * size / one["seconds"] for one in found)
                grown = median(one["grown_mb"] for one in found)
                spread = f"({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
                print(f"{way:<14}{size:>10,}{median(speeds):>14,.0f}  {spread:<20}{grown:>7.1f} MB", flush=True)


def in_own_process(**task: object) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_text(folder: Path, size: int, source: Path | None, target: Path | None) -> dict[str, str]:
    """`size` pairs of short sentences, and the same as tokens."""
    from pl_pipe.recipes.text_file import lines_of
    from pl_pipe.recipes.translation.numbers import NumberLists

    files = {name: folder / f"{size}.{name}" for name in ("source", "target")}
    if source is not None and target is not None:
        pairs = list(zip(lines_of(source), lines_of(target), strict=True))
    else:
        pairs = list(NumberLists("train", range(999), 20_000, 2, 4, seed=0).pairs())
    for side, path in enumerate(files.values()):
        text = "\n".join(pair[side] for pair in pairs) + "\n"
        whole, rest = divmod(size, len(pairs))
        with path.open("w", encoding="utf-8") as file:
            for _ in range(whole):
                file.write(text)
            file.writelines(f"{pair[side]}\n" for pair in pairs[:rest])
    return {name: str(path) for name, path in files.items()}


def read(way: str, size: int, folder: str, source: str, target: str) -> dict[str, float]:
    """Prepares what `way` needs, then times it."""
    import torch

    from pl_pipe.recipes.translation.batches import BucketSampler, Collate
    from pl_pipe.recipes.translation.corpus import TextPair
    from pl_pipe.recipes.translation.encoded import encode, read_encoded
    from pl_pipe.recipes.translation.vocabulary import ListedVocabulary, SubwordVocabulary

    torch.set_num_threads(1)
    corpus = TextPair(Path(source), Path(target))
    work: Callable[[], object]
    if way == "lines":
        work = lambda: sum(1 for _ in corpus.pairs())  # noqa: E731
    elif way == "pretokenised":
        listed = ListedVocabulary({word for pair in _first(corpus, 20_000) for line in pair for word in line.split()})
        place = tempfile.mkdtemp(dir=folder)
        work = lambda: encode(corpus, listed, max_length=200, cache=Path(place))  # noqa: E731
    else:
        lines = (line for pair in _first(corpus, 20_000) for line in pair)
        vocabulary = SubwordVocabulary.trained(lines, size=1000)
        place = tempfile.mkdtemp(dir=folder)
        work = lambda: encode(corpus, vocabulary, max_length=200, cache=Path(place))  # noqa: E731
        if way == "batches":
            pairs, _ = read_encoded(work())  # type: ignore[arg-type]
            sampler = BucketSampler(pairs, batch_size=64, multiple=8, seed=0)
            loader = torch.utils.data.DataLoader(
                pairs,  # type: ignore[arg-type]
                batch_size=64,
                sampler=sampler,
                collate_fn=Collate(8),
            )
            work = lambda: sum(len(batch[1]) for batch in loader)  # noqa: E731
    before = own_memory_mb()
    watched = Peak(before)
    began = time.process_time()
    with watched:
        work()
    return {"seconds": time.process_time() - began, "grown_mb": watched.most - before}


def _first(corpus: object, count: int) -> list[tuple[str, str]]:
    from itertools import islice

    return list(islice(corpus.pairs(), count))  # type: ignore[attr-defined]


def own_memory_mb() -> float:
    """Resident memory that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this needs Linux, whose /proc tells a process's memory")


class Peak:
    """Looks at the memory twenty times a second."""

    def __init__(self, most: float) -> None:
        self.most = most

    def __enter__(self) -> "Peak":
        import threading

        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(0.05):
            self.most = max(self.most, own_memory_mb())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, own_memory_mb())


if __name__ == "__main__":
    main()
