"""Downloads against a server that fails in every way a server can: what came is kept, what is wrong is named."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from file_server import Shelf, serving
from free_port import free_port

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.preparation import space
from pl_pipe.recipes.preparation.cifar10 import Cifar10Preparation
from pl_pipe.recipes.preparation.download import Patience, UnreachableError, download
from pl_pipe.recipes.preparation.report import Silence
from pl_pipe.recipes.preparation.source import Source

CONTENT = os.urandom(1 << 20)
SHA = hashlib.sha256(CONTENT).hexdigest()
QUICK = Patience(timeout_s=5, retries=2, pause_s=0)


class Notes(Silence):
    """What was said, and how far the bars went."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.bars: dict[str, int] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def bar(self, what: str, total_bytes: int | None) -> Iterator[Any]:
        self.bars[what] = 0

        def advance(size: int) -> None:
            self.bars[what] += size

        yield advance


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serving(Shelf({"data.bin": CONTENT})) as found:
        yield found


def fetched(shelf: Shelf, folder: Path, notes: Notes | None = None, *, verify: bool = True, **facts: Any) -> Path:
    source = Source(**{"file": "data.bin", "url": f"{shelf.url}/data.bin", "sha256": SHA, **facts})
    return download(source, folder, notes or Notes(), patience=QUICK, verify=verify)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_file_comes_whole_and_checked(shelf: Shelf, tmp_path: Path) -> None:
    notes = Notes()
    path = fetched(shelf, tmp_path, notes, size_bytes=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["data.bin"]
    assert notes.bars == {"fetching data.bin": len(CONTENT), "checking data.bin": len(CONTENT)}


def test_a_cut_connection_goes_on_where_it_broke(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [400_000, 300_000]
    notes = Notes()
    assert fetched(shelf, tmp_path, notes).read_bytes() == CONTENT
    assert [wanted for _, wanted in shelf.asked] == [None, "bytes=400000-", "bytes=700000-"]
    assert len(notes.said) == 2
    assert "the connection ended after 400.0 kB of 1.0 MB; going on from 400.0 kB" in notes.said[0]


def test_a_broken_call_keeps_what_came_and_the_next_goes_on(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [600_000, 0, 0, 0]
    with pytest.raises(
        UnreachableError, match=r"broke 3 times .*600.0 kB are kept in .*data.bin.part: run the command"
    ):
        fetched(shelf, tmp_path)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.tag"]
    shelf.asked.clear()
    assert fetched(shelf, tmp_path).read_bytes() == CONTENT
    assert shelf.asked == [("data.bin", "bytes=600000-")]
    assert names(tmp_path) == ["data.bin"]


def test_a_server_without_ranges_starts_again(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts, shelf.ranges = [500_000], False
    assert fetched(shelf, tmp_path).read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_not_glued_together(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [500_000, 0, 0, 0]
    with pytest.raises(UnreachableError):
        fetched(shelf, tmp_path, sha256=None)
    shelf.files["data.bin"], shelf.tag = CONTENT[::-1], '"two"'
    assert fetched(shelf, tmp_path, sha256=None).read_bytes() == CONTENT[::-1]


def test_a_wrong_beginning_is_fetched_anew(shelf: Shelf, tmp_path: Path) -> None:
    """As when another program left a file of that name."""
    (tmp_path / "data.bin.part").write_bytes(b"x" * 1000)
    notes = Notes()
    assert fetched(shelf, tmp_path, notes).read_bytes() == CONTENT
    assert "does not fit together" in notes.said[0]


@pytest.mark.parametrize(
    ("left", "requests"), [(CONTENT, 1), (CONTENT + b"more", 2)], ids=["nothing missing", "too long"]
)
def test_a_part_with_nothing_to_add(shelf: Shelf, tmp_path: Path, left: bytes, requests: int) -> None:
    (tmp_path / "data.bin.part").write_bytes(left)
    assert fetched(shelf, tmp_path).read_bytes() == CONTENT
    assert len(shelf.asked) == requests


def test_a_wrong_sum_is_refused_and_nothing_stays(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"gave a file with sha256 {SHA}, expected {'0' * 64}; it was not kept"):
        fetched(shelf, tmp_path, sha256="0" * 64)
    assert names(tmp_path) == []
    assert len(shelf.asked) == 1, "asked again although nothing was resumed"


def test_a_file_of_another_size_is_refused_before_it_comes(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"has {len(CONTENT)} bytes, expected 7; the server has another file"):
        fetched(shelf, tmp_path, size_bytes=7)
    assert names(tmp_path) == []
    assert fetched(shelf, tmp_path, size_bytes=7, sha256="0" * 64, verify=False).read_bytes() == CONTENT


def test_a_missing_file_is_not_asked_for_again(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"127.0.0.1 answers 404 \(Not Found\) for .*/other; the file has moved"):
        fetched(shelf, tmp_path, url=f"{shelf.url}/other")
    assert len(shelf.asked) == 1


def test_a_busy_server_is_asked_again(shelf: Shelf, tmp_path: Path) -> None:
    shelf.codes = [503, 429]
    assert fetched(shelf, tmp_path).read_bytes() == CONTENT
    shelf.codes = [503] * 9
    with pytest.raises(UnreachableError, match=r"broke 3 times \(127.0.0.1 answers 503"):
        fetched(shelf, tmp_path / "..", file="again.bin")


def test_no_server(tmp_path: Path) -> None:
    nowhere = Source(file="a", url=f"http://127.0.0.1:{free_port()}/a")
    with pytest.raises(UnreachableError, match=r"127.0.0.1 cannot be reached \(.*refused"):
        download(nowhere, tmp_path, Notes(), patience=QUICK)


def test_a_full_disk_is_foreseen(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(DataError, match=r"downloading data.bin takes 1.0 MB, but .* free; make room"):
        fetched(shelf, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"file": "../evil"}, "is no plain file name"),
        ({"file": ".."}, "is no plain file name"),
        ({"file": "a", "url": "file:///etc/passwd"}, "neither http nor https"),
        ({"file": "a", "md5": "123"}, "has not 32 hex digits"),
    ],
)
def test_sources_that_make_no_sense(facts: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Source(**facts)
    with pytest.raises(ConfigError, match=words):
        Cifar10Preparation(sources=[facts])
