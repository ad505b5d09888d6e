"""How quickly data is prepared and read: sums, unpacking, a wiki's dump, clouds and images from disk.

    python benchmarks/data/zoo.py [--seconds 5] [--only clouds]

Everything is made in a temporary folder first; nothing is fetched. Seconds are those of one core (CPU time), so that
other programs on the machine matter little; a slow disk does not show.
"""

import argparse
import bz2
import io
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from pl_pipe.recipes.generative.image_files import ImageFilesData
from pl_pipe.recipes.points.cloud_file import read_cloud
from pl_pipe.recipes.preparation.report import Silence
from pl_pipe.recipes.preparation.source import digest_of
from pl_pipe.recipes.preparation.unpacking import unpack
from pl_pipe.recipes.preparation.wiki import articles

MB = 1e6
PARAGRAPH = "'''Rain''' is [[liquid water|water]] in the form of [[droplet]]s that fall.<ref>A book.</ref> {{cite|a}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each is measured at least")
    parser.add_argument("--only", choices=sorted(MEASURED), help="one of them")
    given = parser.parse_args()
    print(f"{'what':28}{'rate':>14}  unit")
    for name, measure in MEASURED.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                for what, rate, unit in measure(Path(folder), given.seconds):
                    print(f"{what:28}{rate:>14,.0f}  {unit}", flush=True)


Row = tuple[str, float, str]


def sums(folder: Path, seconds: float) -> Iterator[Row]:
    path = folder / "file"
    path.write_bytes(os.urandom(64 << 20))
    for algorithm in ("md5", "sha256"):
        rate = repeated(lambda algorithm=algorithm: digest_of(path, algorithm, Silence()), seconds)
        yield algorithm, rate * path.stat().st_size / MB, "MB/s"


def archives(folder: Path, seconds: float) -> Iterator[Row]:
    """As many and as large files as an ImageNet class has."""
    archive = folder / "class.tar"
    content = os.urandom(110_000)
    with tarfile.open(archive, "w") as tar:
        for number in range(300):
            member = tarfile.TarInfo(f"n01440764_{number}.JPEG")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    targets = iter(range(1 << 30))

    def once() -> None:
        target = folder / str(next(targets))
        target.mkdir()
        unpack(archive, target, Silence())

    rate = repeated(once, seconds)
    yield "unpacking 110 kB files", rate * 300, "files/s"
    yield "", rate * archive.stat().st_size / MB, "MB/s"


def wiki(folder: Path, seconds: float) -> Iterator[Row]:
    """Memory must not grow with the dump: it is read twice, the second ten times as large."""
    markup = (PARAGRAPH * 40).replace("<", "&lt;")
    page = f"<page><ns>0</ns><revision><text>{markup}</text></revision></page>"
    for pages in (500, 5000):
        dump = folder / f"{pages}.xml.bz2"
        dump.write_bytes(bz2.compress(f"<mediawiki>{page * pages}</mediawiki>".encode()))
        began = time.process_time()
        count = sum(1 for _ in articles(dump, Silence(), least_words=5))
        rate = count / (time.process_time() - began)
        yield f"wiki, {pages} articles", rate, "articles/s"
        yield "", rate * len(page) / MB, "MB/s of XML"
        yield "", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, "MB resident at most"


def clouds(folder: Path, seconds: float) -> Iterator[Row]:
    """2,500 points of a mesh of 20,000 triangles, or of 10,000 points."""
    random = np.random.default_rng(0)
    points = random.normal(size=(10_000, 3)).astype(np.float32)
    triangles = random.integers(0, len(points), (20_000, 3))
    np.save(folder / "cloud.npy", points)
    np.savetxt(folder / "cloud.txt", points, fmt="%.6f")
    corners = "\n".join("3 " + " ".join(map(str, row)) for row in triangles)
    places = "\n".join(" ".join(f"{value:.6f}" for value in row) for row in points)
    (folder / "cloud.off").write_text(f"OFF\n{len(points)} {len(triangles)} 0\n{places}\n{corners}\n")
    for suffix in (".npy", ".txt", ".off"):
        path = folder / f"cloud{suffix}"
        rate = repeated(lambda path=path: read_cloud(path, 2500, random), seconds)
        yield f"2,500 points of {suffix}", rate, "clouds/s"


def images(folder: Path, seconds: float) -> Iterator[Row]:
    random = np.random.default_rng(0)
    for number in range(64):
        pixels = random.integers(0, 256, (218, 178, 3), dtype=np.uint8)  # CelebA's size
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    data = ImageFilesData(root=str(folder), image_size=64)
    data.setup("fit")
    numbers = iter(range(1 << 30))
    rate = repeated(lambda: data.train_set[next(numbers) % 60], seconds)
    yield "178×218 JPEG to 64×64", rate, "images/s"


def repeated(work: Callable[[], object], seconds: float) -> float:
    """How often in a second of one core."""
    work()
    began, count = time.process_time(), 0
    while time.process_time() - began < seconds:
        work()
        count += 1
    return count / (time.process_time() - began)


MEASURED: dict[str, Callable[[Path, float], Iterator[Row]]] = {
    "sums": sums,
    "archives": archives,
    "wiki": wiki,
    "clouds": clouds,
    "images": images,
}

if __name__ == "__main__":
    main()
