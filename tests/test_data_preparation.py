"""`data prepare`, data set by data set, on small archives: right, again, interrupted, damaged and hostile."""

import bz2
import hashlib
import io
import json
import tarfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_server import Shelf, serving
from free_port import free_port
from test_data_download import Notes, names

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.preparation import space, unpacking
from pl_pipe.recipes.preparation.cifar10 import Cifar10Preparation
from pl_pipe.recipes.preparation.imagenet import DEVKIT, TRAIN, VAL, ImageNetPreparation
from pl_pipe.recipes.preparation.preparation import listed_sum
from pl_pipe.recipes.preparation.report import Silence
from pl_pipe.recipes.preparation.source import Source
from pl_pipe.recipes.preparation.squad import SquadPreparation
from pl_pipe.recipes.preparation.wiki import WikiPreparation, articles
from pl_pipe.recipes.preparation.wikitext import paragraphs
from pl_pipe.recipes.preparation.wmt_ende import WmtEnDePreparation
from pl_pipe.recipes.preparation.workplace import Workplace

NOWHERE = f"http://127.0.0.1:{free_port()}/c.tar.gz"
QUICK = {"pause_s": 0.0, "retries": 1, "timeout_s": 5.0}
CIFAR = {"cifar-10-batches-py/data_batch_1": b"one" * 50, "cifar-10-batches-py/batches.meta": b"names"}


def packed(members: dict[str, bytes], mode: str = "w:gz", links: Sequence[tuple[str, str]] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    return buffer.getvalue()


def cifar(content: bytes | None = None, **settings: Any) -> Cifar10Preparation:
    md5 = None if content is None else hashlib.md5(content).hexdigest()
    return Cifar10Preparation(sources=[{"file": "c.tar.gz", "url": NOWHERE, "md5": md5}], **QUICK, **settings)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serving(Shelf({"c.tar.gz": packed(CIFAR)})) as found:
        yield found


def test_fetched_unpacked_and_done_once(shelf: Shelf, tmp_path: Path) -> None:
    preparation = cifar(shelf.files["c.tar.gz"], mirror=shelf.url)
    notes = Notes()
    preparation.prepare(str(tmp_path / "new" / "root"), notes)
    root = tmp_path / "new" / "root"
    assert {name: (root / name).read_bytes() for name in CIFAR} == CIFAR
    assert f"cifar10 is prepared in {root}: " in notes.said[-2]
    assert notes.said[-1] == f"Next: pl-pipe fit recipe=resnet56 data=cifar10 data.root={root}"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name != "lock"}
    again = Notes()
    cifar(shelf.files["c.tar.gz"], mirror=shelf.url).prepare(str(root), again)
    assert again.said[0] == f"cifar10 is prepared in {root} already; nothing to do"
    assert not again.bars
    cifar(shelf.files["c.tar.gz"]).prepare(str(root), again)
    assert "nothing to do" in again.said[2], "another server, the same file"
    assert len(shelf.asked) == 1
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name != "lock"} == before
    assert not list(root.rglob("*.part"))


def test_what_was_lost_is_made_again(shelf: Shelf, tmp_path: Path) -> None:
    preparation = cifar(shelf.files["c.tar.gz"], mirror=shelf.url)
    preparation.prepare(str(tmp_path), Notes())
    lost, kept = (tmp_path / name for name in CIFAR)
    lost.unlink()
    before = kept.stat().st_mtime_ns
    preparation.prepare(str(tmp_path), Notes())
    assert lost.read_bytes() == CIFAR["cifar-10-batches-py/data_batch_1"]
    assert kept.stat().st_mtime_ns == before, "a file that was there was written again"
    assert len(shelf.asked) == 1, "the archive was there"


def test_an_archive_that_the_user_has_is_taken(tmp_path: Path) -> None:
    archive = packed(CIFAR)
    (tmp_path / "c.tar.gz").write_bytes(archive)
    notes = Notes()
    cifar(archive).prepare(str(tmp_path), notes)
    assert (tmp_path / "cifar-10-batches-py" / "batches.meta").read_bytes() == b"names"
    assert "checking c.tar.gz" in notes.bars
    (tmp_path / "cifar-10-batches-py" / "batches.meta").unlink()
    again = Notes()
    cifar(archive).prepare(str(tmp_path), again)
    assert "checking c.tar.gz" not in again.bars, "a sum that is known was computed again"


def test_a_users_archive_with_a_wrong_sum_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "c.tar.gz").write_bytes(packed({"a": b"other"}))
    with pytest.raises(
        DataError, match=r"c.tar.gz has md5 .*, expected .*left alone: fetch it anew, or set prepare.verif"
    ):
        cifar(packed(CIFAR)).prepare(str(tmp_path), Notes())
    assert names(tmp_path) == [".pl-pipe", "c.tar.gz"]
    cifar(packed(CIFAR), verify=False).prepare(str(tmp_path), Notes())
    assert (tmp_path / "a").read_bytes() == b"other"


def test_offline_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    for settings in ({}, {"offline": True}):
        with pytest.raises(DataError) as caught:
            cifar(packed(CIFAR), **settings).prepare(str(tmp_path), Notes())
        text = str(caught.value)
        assert "Fetch by hand, put it there, and run the same command again:" in text
        assert f"{NOWHERE} -> {tmp_path / 'c.tar.gz'} (md5 " in text


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (packed({"../outside": b"x"}), r"called '../outside', which would be written outside"),
        (packed({"good": b"y", "/outside": b"x"}), r"called '/outside', which would be written outside"),
        (packed({"a/../../outside": b"x"}), r"which would be written outside"),
        (packed({"good": b"y"}, links=[("way", "/")]), r"'way' that is neither a file nor a folder"),
        (b"no archive", r"c.tar.gz is damaged or no tar archive"),
        (packed(CIFAR)[:-20], r"c.tar.gz is damaged or no tar archive"),
    ],
    ids=["dots", "absolute", "hidden dots", "link", "no archive", "cut"],
)
def test_hostile_and_damaged_archives_leave_nothing(tmp_path: Path, archive: bytes, words: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "c.tar.gz").write_bytes(archive)
    with pytest.raises(DataError, match=words):
        cifar().prepare(str(root), Notes())
    assert names(tmp_path) == ["root"]
    assert names(root) == [".pl-pipe", "c.tar.gz"]
    assert not Path("/outside").exists()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "c.tar.gz").write_bytes(packed(CIFAR))
    own = tmp_path / "cifar-10-batches-py" / "batches.meta"
    own.parent.mkdir()
    own.write_bytes(b"my own work")
    with pytest.raises(DataError, match=r"batches.meta has 11 bytes, in .*c.tar.gz it has 5; it is another file"):
        cifar().prepare(str(tmp_path), Notes())
    assert own.read_bytes() == b"my own work"
    assert names(own.parent) == ["batches.meta"]


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.tar.gz").write_bytes(packed(CIFAR))
    monkeypatch.setattr(space, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(DataError, match=r"unpacking c.tar.gz takes 155 B, but .* free; make room, or set data.root"):
        cifar().prepare(str(tmp_path), Notes())
    assert names(tmp_path) == [".pl-pipe", "c.tar.gz"]


def test_two_commands_in_one_folder(tmp_path: Path) -> None:
    with (
        Workplace.opened(tmp_path),
        pytest.raises(DataError, match=r"another pl-pipe data prepare works in"),
        Workplace.opened(tmp_path),
    ):
        pass
    with Workplace.opened(tmp_path):  # and afterwards
        pass


def test_roots_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file is not a folder"):
        cifar().prepare(str(tmp_path / "file"), Notes())
    with pytest.raises(ConfigError, match=r"data.root is not set; .*pl-pipe data prepare cifar10 data.root=FOLDER"):
        cifar().prepare(None, Notes())


# ---- ImageNet


def imagenet_archives(root: Path, *, labels: Sequence[int] = (2, 1, 2)) -> None:
    """Two classes of two and one images; three for validation."""
    import numpy as np
    from scipy.io import savemat

    classes = {
        "n01440764": packed({f"n01440764_{k}.JPEG": b"fish" * k for k in (1, 2)}, "w"),
        "n02084071": packed({"n02084071_5.JPEG": b"dog"}, "w"),
    }
    (root / TRAIN).write_bytes(packed({f"{name}.tar": content for name, content in classes.items()}, "w"))
    (root / VAL).write_bytes(packed({f"ILSVRC2012_val_{k:08d}.JPEG": b"v" * k for k in (1, 2, 3)}, "w"))
    kinds = [("ILSVRC2012_ID", object), ("WNID", object)]
    # The ids are not in the order of the names, and the third entry is a group of classes.
    synsets = np.array([(1, "n02084071"), (2, "n01440764"), (1001, "n00001740")], dtype=kinds)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets.reshape(-1, 1)})
    truth = "".join(f"{label}\n" for label in labels).encode()
    devkit = {
        "ILSVRC2012_devkit_t12/data/meta.mat": buffer.getvalue(),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": truth,
    }
    (root / DEVKIT).write_bytes(packed(devkit))


def imagenet(**settings: Any) -> ImageNetPreparation:
    return ImageNetPreparation(sources=[{"file": name, "page": "a page"} for name in (TRAIN, VAL, DEVKIT)], **settings)


IMAGES = {
    "train/n01440764/n01440764_1.JPEG": b"fish",
    "train/n01440764/n01440764_2.JPEG": b"fishfish",
    "train/n02084071/n02084071_5.JPEG": b"dog",
    "val/n01440764/ILSVRC2012_val_00000001.JPEG": b"v",
    "val/n01440764/ILSVRC2012_val_00000003.JPEG": b"vvv",
    "val/n02084071/ILSVRC2012_val_00000002.JPEG": b"vv",
}


def images(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for split in ("train", "val")
        for path in (root / split).rglob("*")
        if path.is_file()
    }


def test_imagenet_from_its_archives(tmp_path: Path) -> None:
    imagenet_archives(tmp_path)
    imagenet().prepare(str(tmp_path), Notes())
    assert images(tmp_path) == IMAGES
    notes = Notes()
    imagenet().prepare(str(tmp_path), notes)
    assert "nothing to do" in notes.said[0]


IN_ORDER = "n01440764\nn02084071\nn01440764\n"
BY_NAME = (
    "ILSVRC2012_val_00000003.JPEG n01440764\nILSVRC2012_val_00000001.JPEG n01440764\n"
    "ILSVRC2012_val_00000002.JPEG n02084071\n"
)


@pytest.mark.parametrize("content", [IN_ORDER, BY_NAME], ids=["in order", "by name"])
def test_imagenet_with_a_list_of_labels(tmp_path: Path, content: str) -> None:
    imagenet_archives(tmp_path)
    (tmp_path / DEVKIT).unlink()
    (tmp_path / "labels.txt").write_text(content)
    imagenet(validation_labels=str(tmp_path / "labels.txt")).prepare(str(tmp_path), Notes())
    assert images(tmp_path) == IMAGES


def test_imagenet_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imagenet_archives(tmp_path)
    write, written = unpacking.write_member, []

    def broken(tar: Any, member: Any, target: Path, *rest: Any, **others: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(target.name)
        write(tar, member, target, *rest, **others)

    monkeypatch.setattr("pl_pipe.recipes.preparation.imagenet.write_member", broken)
    with pytest.raises(KeyboardInterrupt):
        imagenet().prepare(str(tmp_path), Notes())
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [".n02084071.part", "n01440764"]
    monkeypatch.setattr("pl_pipe.recipes.preparation.imagenet.write_member", write)
    before = (tmp_path / "train" / "n01440764" / "n01440764_1.JPEG").stat().st_mtime_ns
    notes = Notes()
    imagenet().prepare(str(tmp_path), notes)
    assert "1 of 2 classes are there already" in notes.said
    assert images(tmp_path) == IMAGES
    assert (tmp_path / "train" / "n01440764" / "n01440764_1.JPEG").stat().st_mtime_ns == before


def test_imagenet_without_its_archives(tmp_path: Path) -> None:
    imagenet_archives(tmp_path)
    (tmp_path / VAL).unlink()
    with pytest.raises(DataError, match=r"registration or a licence\).*\n.*by hand.*\n  a page -> .*img_val.tar$"):
        imagenet().prepare(str(tmp_path), Notes())
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize(("labels", "words"), [((2, 1), "there are 2 labels"), ((2, 1, 7), "numbers of classes")])
def test_imagenet_with_labels_that_do_not_fit(tmp_path: Path, labels: Sequence[int], words: str) -> None:
    imagenet_archives(tmp_path, labels=labels)
    with pytest.raises(DataError, match=words):
        imagenet().prepare(str(tmp_path), Notes())


def test_imagenet_refuses_a_hostile_class(tmp_path: Path) -> None:
    imagenet_archives(tmp_path)
    (tmp_path / TRAIN).write_bytes(packed({"n01440764.tar": packed({"../../evil.JPEG": b"x"}, "w")}, "w"))
    with pytest.raises(DataError, match=r"n01440764.tar has a member called '../../evil.JPEG'"):
        imagenet().prepare(str(tmp_path), Notes())
    assert not list(tmp_path.rglob("evil*"))


# ---- SQuAD


def squad(root: Path, content: str) -> None:
    (root / "train.json").write_text(content)
    SquadPreparation(sources=[{"file": "train.json", "url": NOWHERE}]).prepare(str(root), Notes())


def test_squad_is_of_the_right_version(tmp_path: Path) -> None:
    squad(tmp_path, json.dumps({"version": "v2.0", "data": [{}]}))
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"is of SQuAD version 1.1, expected v2.0"):
        squad(tmp_path / "other", json.dumps({"version": "1.1", "data": []}))
    with pytest.raises(DataError, match=r"train.json is no SQuAD file"):
        squad(tmp_path / "other", "[]")


# ---- WMT


def build_vocabulary(files: list[Path], folder: Path, *, size: int) -> list[Path]:
    """A hook as another package would bring it."""
    (folder / "vocabulary.txt").write_text(f"{size} {[file.name for file in files]}")
    return [folder / "vocabulary.txt"]


def wmt(
    root: Path, *, german: bytes = b"eins\nzwei\n", hook: str | None = "test_data_preparation.build_vocabulary"
) -> WmtEnDePreparation:
    sgm = '<srcset><doc>\n<p>\n<seg id="1"> A  &amp; B </seg>\n<seg id="2">two</seg>\n</p></doc></srcset>'
    archives = {
        "a.tgz": {"training/a.en": b"one\ntwo\n", "training/a.de": german, "training/a.fr": b"un\n"},
        "b.tgz": {"./b.en": "three\u2028still three".encode(), "./b.de": b"drei"},
        "t.tgz": {"test/src.en.sgm": sgm.encode(), "test/ref.de.sgm": sgm.replace("two", "zwei").encode()},
    }
    for name, members in archives.items():
        (root / name).write_bytes(packed(members))
    texts = {
        "train": [
            {"archive": "a.tgz", "en": "training/a.en", "de": "training/a.de"},
            {"archive": "b.tgz", "en": "b.en", "de": "b.de"},
        ],
        "newstest": [{"archive": "t.tgz", "en": "test/src.en.sgm", "de": "test/ref.de.sgm"}],
    }
    return WmtEnDePreparation(
        sources=[{"file": name} for name in archives], texts=texts, vocabulary={"hook": hook, "settings": {"size": 9}}
    )


def test_wmt_is_one_pair_of_texts(tmp_path: Path) -> None:
    notes = Notes()
    wmt(tmp_path).prepare(str(tmp_path), notes)
    assert (tmp_path / "train.en").read_bytes() == "one\ntwo\nthree\u2028still three\n".encode()
    assert (tmp_path / "train.de").read_text() == "eins\nzwei\ndrei\n"
    assert (tmp_path / "newstest.en").read_text() == "A &amp; B\ntwo\n"
    assert (tmp_path / "newstest.de").read_text() == "A &amp; B\nzwei\n"
    assert (tmp_path / "vocabulary.txt").read_text() == "9 ['train.en', 'train.de']"
    assert "train: 3 pairs of sentences" in notes.said
    assert not (tmp_path / "unpacked" / "training" / "a.fr").exists()


def test_wmt_with_sentences_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.en has 3 lines, .*train.de has 2; sentences would not belong"):
        wmt(tmp_path, german=b"eins\n").prepare(str(tmp_path), Notes())


def test_a_hook_that_is_not_installed_is_known_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"prepare.vocabulary.hook=no.such.step cannot be imported .*hook=null to prep"
    ):
        wmt(tmp_path, hook="no.such.step").prepare(str(tmp_path), Notes())
    assert not (tmp_path / "unpacked").exists()
    wmt(tmp_path, hook=None).prepare(str(tmp_path), Notes())
    assert not (tmp_path / "vocabulary.txt").exists()
    wmt(tmp_path).prepare(str(tmp_path), Notes())
    assert (tmp_path / "vocabulary.txt").exists(), "other settings are another outcome"


def strays(files: list[Path], folder: Path, *, size: int) -> list[Path]:
    return [folder.parent / "elsewhere"]


def test_a_hook_that_writes_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"hook=test_data_preparation.strays says that it made .*elsewhere, which is n"
    ):
        wmt(tmp_path, hook="test_data_preparation.strays").prepare(str(tmp_path), Notes())


def test_wmt_with_an_archive_of_something_else(tmp_path: Path) -> None:
    preparation = wmt(tmp_path)
    (tmp_path / "b.tgz").write_bytes(packed({"c.en": b""}))
    with pytest.raises(DataError, match=r"b.tgz has no b.de in it; fetch the right archive"):
        preparation.prepare(str(tmp_path), Notes())


# ---- Wikipedia

ARTICLE = """{{Infobox|name={{nested|a}}|x=1}}<!-- hidden -->
'''Rain''' is [[liquid water|water]] in the form of [[droplet]]s that fall.<ref name="a">A book [[x]].</ref>

== History ==
[[File:Rain.jpg|thumb|A caption with [[link]]s in it that has many words]]
{| class="wikitable"
| a cell that has more than five words in it
|}
* It falls &amp; falls, says [https://example.org the weather office] of <i>Oslo</i>.
Short line.
[[Category:Weather]]
"""
ESCAPED = ARTICLE.replace("&", "&amp;").replace("<", "&lt;")
PAGES = f"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo/>
<page><title>Rain</title><ns>0</ns><revision><text>{ESCAPED}</text></revision></page>
<page><title>Talk:Rain</title><ns>1</ns><revision><text>a b c d e f g h</text></revision></page>
<page><title>Wet</title><ns>0</ns><redirect title="Rain"/><revision><text>a b c d e f g h</text></revision></page>
<page><title>Snow</title><ns>0</ns><revision><text>Snow is made of crystals of ice.</text></revision></page>
</mediawiki>"""
RAIN = [
    "Rain is water in the form of droplets that fall.",
    "It falls & falls, says the weather office of Oslo .",
]


def build_shards(files: list[Path], folder: Path) -> list[Path]:
    (folder / "0.hdf5").write_text(" ".join(file.name for file in files))
    return [folder / "0.hdf5"]


def wiki(**settings: Any) -> WikiPreparation:
    name = "testwiki-latest-pages-articles.xml.bz2"
    source = {"file": name, "url": NOWHERE, "sums_url": NOWHERE.replace("c.tar.gz", "sums.txt")}
    return WikiPreparation(
        **{"sources": [source], "shards": {"hook": "test_data_preparation.build_shards"}, **QUICK, **settings}
    )


def test_markup_becomes_paragraphs() -> None:
    assert paragraphs(ARTICLE) == RAIN
    assert paragraphs("{{ an end is missing, but the words are kept") == ["an end is missing, but the words are kept"]
    assert paragraphs("a {{b {{c}} d}} e }} f g h", least_words=1) == ["a e }} f g h"]


def test_a_wiki_says_what_it_calls_its_files(tmp_path: Path) -> None:
    """`Datei` and `Kategorie` in a German one; a word before a colon is none of them."""
    names_of_spaces = '<namespace key="6" case="x">Datei</namespace><namespace key="4">Projekt</namespace>'
    markup = "Es regnet heute sehr lange [[Datei:a.jpg|mini|ein Bild]] und [[Projekt:Wetter|immer noch]] viel."
    dump = (
        f"<mediawiki><siteinfo><namespaces>{names_of_spaces}</namespaces></siteinfo><page><title>t</title><ns>0</ns>"
        f"<revision><text>{markup}</text></revision></page></mediawiki>"
    )
    (tmp_path / "testwiki-latest-pages-articles.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    wiki(verify=False).prepare(str(tmp_path), Notes())
    text = (tmp_path / "text" / "wiki_0000.txt").read_text()
    assert text == "Es regnet heute sehr lange und immer noch viel.\n\n"


def test_wiki_from_a_server_that_lists_its_sums(tmp_path: Path) -> None:
    name = "testwiki-latest-pages-articles.xml.bz2"
    dump = bz2.compress(PAGES.encode())
    md5 = hashlib.md5(dump).hexdigest()
    sums = f"{'0' * 32}  testwiki-20260101-pages-articles-multistream.xml.bz2\n{md5}  testwiki-20260101-{name[16:]}\n"
    with serving(Shelf({name: dump, "sums.txt": sums.encode()})) as shelf:
        wiki(mirror=shelf.url).prepare(str(tmp_path), Notes())
        assert (tmp_path / "text" / "wiki_0000.txt").read_text() == "\n".join(
            RAIN
        ) + "\n\nSnow is made of crystals of ice.\n\n"
        assert (tmp_path / "shards" / "0.hdf5").read_text() == "wiki_0000.txt"
        shelf.files["sums.txt"] = sums.replace(md5, "1" * 32).encode()
        with pytest.raises(DataError, match=rf"gave a file with md5 {md5}, expected 1111"):
            wiki(mirror=shelf.url).prepare(str(tmp_path / "other"), Notes())


def test_a_dump_that_the_user_has_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "testwiki-latest-pages-articles.xml.bz2").write_bytes(bz2.compress(PAGES.encode()))
    notes = Notes()
    wiki(text_bytes=60).prepare(str(tmp_path), notes)
    assert any("stays unchecked" in text for text in notes.said)
    assert names(tmp_path / "text") == [".made_of.json", "wiki_0000.txt", "wiki_0001.txt"]
    with pytest.raises(DataError, match=r"text holds texts of another dump, or made with other settings; move it away"):
        wiki().prepare(str(tmp_path), Notes())


def test_a_dump_is_read_in_constant_memory(tmp_path: Path) -> None:
    page = "<page><ns>0</ns><revision><text>" + "rain" * 10_000 + "</text></revision></page>\n"
    (tmp_path / "dump.xml").write_text(f"<mediawiki>{page * 400}</mediawiki>")
    tracemalloc.start()
    try:
        count = sum(1 for _ in articles(tmp_path / "dump.xml", Silence(), least_words=1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 400
    assert peak < 2e6, "of 16 MB of text"


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        (bz2.compress(PAGES.encode())[:-30], "is damaged or no dump of a wiki"),
        (bz2.compress(PAGES[:-40].encode()), "is damaged or no dump of a wiki"),
        (b"text", "is damaged or no dump of a wiki"),
        (bz2.compress(b"<mediawiki/>"), "has no articles in it"),
    ],
    ids=["cut", "cut before", "other", "empty"],
)
def test_damaged_dumps_leave_no_text(tmp_path: Path, dump: bytes, words: str) -> None:
    (tmp_path / "testwiki-latest-pages-articles.xml.bz2").write_bytes(dump)
    with pytest.raises(DataError, match=words):
        wiki(verify=False).prepare(str(tmp_path), Notes())
    assert not (tmp_path / "text").exists()


def test_a_list_without_the_file() -> None:
    with pytest.raises(DataError, match=r"lists no sum for a.xml; set prepare.verify=false"):
        listed_sum("", Source(file="a.xml", sums_url="http://x"))
