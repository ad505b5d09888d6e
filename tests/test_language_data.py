"""Text into ids, sequences, shards and batches, and what is said where a file is not as it should be."""

import gzip
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pl_pipe.errors import CheckpointError, ConfigError, DataError
from pl_pipe.recipes.language import instances as instances_module
from pl_pipe.recipes.language import make_shards as make_shards_tool
from pl_pipe.recipes.language.instances import KEYS, InstanceMaker, InstanceRule, Rows, empty_rows, joined
from pl_pipe.recipes.language.plain_text import read_documents
from pl_pipe.recipes.language.pretraining_data import SyntheticText, WikiData
from pl_pipe.recipes.language.shard_writer import make_shards
from pl_pipe.recipes.language.shards import BlockOrder, ShardBatches, Shards
from pl_pipe.recipes.language.synthetic_corpus import documents
from pl_pipe.recipes.language.text_data import LanguageModelText
from pl_pipe.recipes.language.token_file import Part, count_tokens, frequent_tokens, numbered, write_tokens
from pl_pipe.recipes.language.vocabulary import (
    EMBEDDED,
    SPECIAL,
    Vocabulary,
    encode_all,
    read_vocabulary,
    train_vocabulary,
    write_vocabulary,
)

h5py = pytest.importorskip("h5py", reason="of the text extra")
RULE = InstanceRule(sequence_length=16, most_masked=3)


def write_shard(path: Path, *, rows: Iterable[int], without: tuple[str, ...] = (), compress: bool = False) -> None:
    """Rows that can be told apart by their first token."""
    numbers = np.array(list(rows))
    content = empty_rows(len(numbers), RULE)
    content["input_ids"][:] = numbers[:, None] + np.arange(16)
    content["input_mask"][:] = 1
    content["masked_lm_positions"][:, 0] = 2
    content["masked_lm_ids"][:, 0] = 7
    with h5py.File(path, "w") as file:
        for name, values in content.items():
            if name not in without:
                file.create_dataset(name, data=values, compression="gzip" if compress else None)


# ---- vocabulary


def test_the_embedded_vocabulary_knows_the_made_up_language() -> None:
    vocabulary = read_vocabulary(None)
    tokenizer = vocabulary.tokenizer()
    for sentence in next(iter(documents(1, seed=3))):
        assert tokenizer.encode(sentence).tokens == sentence.split()
    assert vocabulary.tokens[:5] == SPECIAL


def test_a_vocabulary_is_trained_written_and_read(tmp_path: Path) -> None:
    made = train_vocabulary(["low lower lowest", "new newer newest"] * 5, size=60, quiet=True)
    write_vocabulary(made, tmp_path / "vocab.txt")
    again = read_vocabulary(str(tmp_path / "vocab.txt"))
    assert again == made
    assert again.digest == made.digest != read_vocabulary(None).digest
    ids = encode_all(again.tokenizer(), ["lowest newer", "xyz"])
    assert [again.tokens[number] for number in ids[1]] == ["[UNK]"]
    assert "".join(again.tokens[number].removeprefix("##") for number in ids[0]) == "lowestnewer"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\nword\n", r"has no \[CLS\], \[SEP\], \[MASK\] among its 3 lines"),
        (b"\xff\xfe", r"is not UTF-8 \(byte 0\)"),
        ("\n".join([*SPECIAL, "twice", "twice"]).encode(), r"has the token 'twice' twice"),
    ],
)
def test_bad_vocabularies_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_vocabulary(str(tmp_path / "vocab.txt"))
    with pytest.raises(DataError, match=r"data.vocabulary=/no/such is no file"):
        read_vocabulary("/no/such")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"tokenizers is not installed .* pip install 'pl-pipe\[text\]'"):
        read_vocabulary(None).tokenizer()


# ---- text


def test_documents_are_separated_by_empty_lines_and_by_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One. Two! Three\nfour.\n\n \n\nFive.\n", encoding="utf-8")
    with gzip.open(tmp_path / "b.gz", "wt") as file:
        file.write("Six at 3.5 p.m. today.")
    found = list(read_documents([tmp_path / "a.txt", tmp_path / "b.gz"]))
    assert found == [["One.", "Two!", "Three", "four."], ["Five."], ["Six at 3.5 p.m. today."]]


def test_bad_text_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("gut\nschön\n".encode("latin1"))
    with pytest.raises(DataError, match=r"latin.txt, line 2: byte 4 \(0xf6\) is not UTF-8"):
        list(read_documents([tmp_path / "latin.txt"]))
    with pytest.raises(DataError, match=r"none.txt is no file"):
        list(read_documents([tmp_path / "none.txt"]))


# ---- sequences


def made_rows(rule: InstanceRule, *, count: int = 40, seed: int = 0) -> tuple[Rows, InstanceMaker, Vocabulary]:
    vocabulary = read_vocabulary(None)
    tokenizer = vocabulary.tokenizer()
    maker = InstanceMaker(vocabulary, rule, seed=seed)
    rows = joined(list(maker.rows(encode_all(tokenizer, text) for text in documents(count, seed=seed))))
    return rows, maker, vocabulary


@pytest.mark.parametrize("length", [8, 32, 64])
def test_sequences_are_as_bert_wants_them(length: int) -> None:
    rows, maker, vocabulary = made_rows(InstanceRule(length, most_masked=6))
    ids = vocabulary.ids
    assert {name: str(values.dtype) for name, values in rows.items()} == {
        name: {"i4": "int32", "i1": "int8"}[kind] for name, kind in KEYS.items()
    }
    assert len(rows["input_ids"]) == maker.tally.sequences > 20
    for place in range(len(rows["input_ids"])):
        used = int(rows["input_mask"][place].sum())
        tokens = rows["input_ids"][place].copy()
        assert not tokens[used:].any()
        positions = rows["masked_lm_positions"][place]
        positions = positions[: np.count_nonzero(positions)]
        assert 1 <= len(positions) <= min(6, max(1, round(used * 0.15)))
        assert list(positions) == sorted(set(positions.tolist()))
        tokens[positions] = rows["masked_lm_ids"][place, : len(positions)]
        assert tokens[0] == ids["[CLS]"]
        separators = np.flatnonzero(tokens[:used] == ids["[SEP]"])
        assert len(separators) == 2
        assert separators[1] == used - 1
        assert separators[0] >= 2
        assert separators[1] - separators[0] >= 2
        assert list(rows["segment_ids"][place]) == [0] * (separators[0] + 1) + [1] * (used - separators[0] - 1) + [
            0
        ] * (length - used)
        assert ids["[MASK]"] not in tokens


def test_masks_and_second_segments_have_the_published_shares() -> None:
    rows, _, vocabulary = made_rows(InstanceRule(32, most_masked=6), count=700)
    real = rows["masked_lm_positions"] > 0
    seen = np.take_along_axis(rows["input_ids"], rows["masked_lm_positions"], axis=1)[real]
    assert np.mean(seen == vocabulary.ids["[MASK]"]) == pytest.approx(0.8, abs=0.02)
    assert np.mean(seen == rows["masked_lm_ids"][real]) == pytest.approx(0.1, abs=0.02)
    assert 0.5 < np.mean(rows["next_sentence_labels"]) < 0.65  # a last sentence that is alone has no successor


def test_second_segments_follow_or_come_from_another_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents whose words are theirs alone; two of them are at hand at a time."""
    monkeypatch.setattr(instances_module, "ROOM", 2)
    vocabulary = Vocabulary((*SPECIAL, *(f"w{number}" for number in range(400))))
    texts = [[[5 + 40 * d + 4 * s + k for k in range(4)] for s in range(10)] for d in range(5)]
    maker = InstanceMaker(vocabulary, InstanceRule(24, most_masked=1, masked_share=0.01, short_share=0.0, copies=3))
    rows = joined(list(maker.rows(iter(texts))))
    assert maker.tally.documents == 5
    assert {0, 1} == set(rows["next_sentence_labels"].tolist())
    for ids, masked, position, elsewhere in zip(
        rows["input_ids"], rows["masked_lm_ids"], rows["masked_lm_positions"], rows["next_sentence_labels"], strict=True
    ):
        tokens = ids.copy()
        tokens[position[0]] = masked[0]
        first, second, *_ = np.split(tokens[1:], np.flatnonzero(tokens[1:] == vocabulary.ids["[SEP]"]))
        second = second[1:]
        assert list(first) == list(range(first[0], first[0] + len(first)))
        if elsewhere:
            assert (first[0] - 5) // 40 != (second[0] - 5) // 40
        else:
            assert (first[0] - 5) // 40 == (second[0] - 5) // 40
            assert second[0] > first[-1]
    with pytest.raises(DataError, match=r"one document only"):
        list(InstanceMaker(vocabulary, RULE).rows([texts[0]]))


def test_long_sentences_are_divided_and_counted() -> None:
    vocabulary = Vocabulary((*SPECIAL, *(f"w{number}" for number in range(100))))
    maker = InstanceMaker(vocabulary, InstanceRule(16, most_masked=2, short_share=0.0))
    rows = joined(list(maker.rows([[list(range(5, 45))], [list(range(50, 56))]])))
    assert (maker.tally.documents, maker.tally.sentences, maker.tally.split_sentences) == (2, 2, 1)
    found = set(rows["input_ids"].ravel().tolist()) | set(rows["masked_lm_ids"].ravel().tolist())
    assert set(range(50, 56)) <= found
    assert maker.tally.cut_tokens > 0
    assert "1 sentences were longer" in maker.tally.describe()


@pytest.mark.parametrize("settings", [{"sequence_length": 7}, {"most_masked": 0}, {"masked_share": 1.0}, {"copies": 0}])
def test_rules_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        InstanceRule(**settings)  # type: ignore[arg-type]


def test_the_embedded_corpus_repeats_with_its_seed() -> None:
    first, again, other = (SyntheticText(num_documents=20, num_val_documents=5, seed=seed) for seed in (0, 0, 1))
    batches = []
    for data in (first, again, other):
        data.setup("fit")
        batches.append(next(iter(data.val_dataloader())))
    assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert not torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    assert {name: values.dtype for name, values in batches[0].items()} == dict.fromkeys(KEYS, torch.int64)


# ---- shards


@pytest.mark.parametrize("compress", [False, True])
def test_text_becomes_shards_and_batches(tmp_path: Path, compress: bool) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("\n\n".join("\n".join(document) for document in documents(60, seed=1)))
    report = make_shards(
        [text], tmp_path / "shards", vocabulary=read_vocabulary(None), rule=InstanceRule(32, 5), shards=3,
        validation_share=0.2, compress=compress,
    )  # fmt: skip
    assert [path.name for path in report.paths] == [f"train_00{k}.hdf5" for k in range(3)] + ["val_000.hdf5"]
    assert report.tally.documents == 60
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [path.name for path in report.paths]
    data = WikiData(root=str(tmp_path / "shards"), vocabulary=str(EMBEDDED), batch_size=16, num_workers=0)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert sum(len(batch["input_ids"]) for batch in batches) == len(data.shards)
    assert data.held_shards is not None
    assert len(data.shards) + len(data.held_shards) == report.tally.sequences
    assert batches[0]["input_ids"].shape == (16, 32)
    assert batches[0]["next_sentence_labels"].shape == (16,)
    with pytest.raises(DataError, match=r"holds 4 shards already, as train_000.hdf5"):
        make_shards([text], tmp_path / "shards", vocabulary=read_vocabulary(None), rule=RULE)


def test_the_tool_trains_a_vocabulary_and_says_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "corpus.txt", tmp_path / "shards"
    text.write_text("\n\n".join("\n".join(document) for document in documents(30, seed=1)))
    settings = ["--out", str(out), "--vocabulary-size", "150", "--sequence-length", "32", "--shards", "2"]
    monkeypatch.setattr(sys, "argv", ["make_shards", str(text), *settings])
    with pytest.raises(SystemExit) as ended:
        make_shards_tool.main()
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "30 documents" in said
    assert len(read_vocabulary(str(out / "vocab.txt"))) <= 150
    WikiData(root=str(out), vocabulary=str(out / "vocab.txt"))
    for message in ("shards already, as train_000.hdf5", "vocab.txt exists already; use it by --vocabulary"):
        before = (out / "vocab.txt").read_bytes()
        with pytest.raises(SystemExit) as ended:
            make_shards_tool.main()
        assert ended.value.code == 1
        assert message in capsys.readouterr().err
        assert (out / "vocab.txt").read_bytes() == before
        for shard in out.glob("*.hdf5"):
            shard.unlink()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--vocabulary-size", "3"], "--vocabulary-size=3 leaves no room beside [PAD]"),
        (["--vocabulary", "nowhere"], "--vocabulary nowhere is no file"),
        (["--validation-share", "0.6"], "validation_share=0.6 from 0 to 0.5"),
        ([], "the text has one document only"),
    ],
)
def test_a_tool_that_fails_leaves_nothing_in_the_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    message: str,
) -> None:
    (tmp_path / "one.txt").write_text("the cook has a ladle .\n" * 9)
    arguments = [str(tmp_path / "one.txt"), "--out", str(tmp_path / "out"), "--vocabulary-size", "150", *settings]
    monkeypatch.setattr(sys, "argv", ["make_shards", *arguments])
    with pytest.raises(SystemExit) as ended:
        make_shards_tool.main()
    assert ended.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("out/*"))


def test_shards_for_validation_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("the cook\n\nthe baker\n")
    settings: dict[str, Any] = {"vocabulary": read_vocabulary(None), "rule": RULE, "validation_share": 0.5}
    with pytest.raises(DataError, match=r"all 2 documents were drawn for validation, none is left"):
        make_shards([tmp_path / "two.txt"], tmp_path / "out", seed=3, **settings)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("seed", range(6))
def test_no_document_is_lost_between_training_and_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rooms of two, so that documents for validation are written while others are still read."""
    monkeypatch.setattr("pl_pipe.recipes.language.shard_writer.ROOM", 2)
    monkeypatch.setattr(instances_module, "ROOM", 2)
    text = tmp_path / "corpus.txt"
    text.write_text("\n\n".join("\n".join(document) for document in documents(14, seed=seed)))
    report = make_shards(
        [text],
        tmp_path / "out",
        vocabulary=read_vocabulary(None),
        rule=RULE,
        shards=1,
        validation_share=0.15,
        seed=seed,
    )
    assert report.tally.documents == 14
    assert report.tally.sequences == sum(len(Shards([path])) for path in report.paths)


def test_labels_may_be_a_column(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=range(8))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        del file["next_sentence_labels"]
        file["next_sentence_labels"] = np.arange(8)[:, None] % 2
    batch = ShardBatches(Shards([tmp_path / "a.hdf5"]), batch_size=5, vocabulary_size=100)[0]
    assert batch["next_sentence_labels"].tolist() == [0, 1, 0, 1, 0]


def test_shards_cut_short_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"the cook\n\nthe baker\n\n\xff\n")
    with pytest.raises(DataError, match=r"line 5"):
        make_shards([tmp_path / "bad.txt"], tmp_path / "out", vocabulary=read_vocabulary(None), rule=RULE)
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match=r"no text in it"):
        make_shards([tmp_path / "empty.txt"], tmp_path / "out", vocabulary=read_vocabulary(None), rule=RULE)
    assert list((tmp_path / "out").iterdir()) == []


def shards_of(folder: Path, *sizes: int, compress: bool = False) -> Shards:
    paths, first = [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number:02d}.hdf5")
        write_shard(paths[-1], rows=range(first, first + size), compress=compress)
        first += size
    return Shards(paths)


@pytest.mark.parametrize("compress", [False, True])
def test_batches_run_over_the_ends_of_files(tmp_path: Path, compress: bool) -> None:
    """Six files, of which four may be open at a time."""
    shards = shards_of(tmp_path, 5, 1, 9, 2, 2, 3, compress=compress)
    data = ShardBatches(shards, batch_size=4, vocabulary_size=100)
    assert (len(shards), len(data)) == (22, 6)
    rows = [data[number]["input_ids"][:, 0].tolist() for number in (5, 0, 3, 1, 2, 4)]
    assert rows == [[20, 21], [0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11], [16, 17, 18, 19]]
    part = ShardBatches(shards, batch_size=4, vocabulary_size=100, first=3, last=9)
    assert [part[number]["input_ids"][:, 0].tolist() for number in range(len(part))] == [[3, 4, 5, 6], [7, 8]]
    with pytest.raises(IndexError):
        data[6]


@pytest.mark.parametrize(("batches", "replicas", "workers"), [(23, 1, 0), (23, 1, 3), (23, 2, 2), (7, 3, 1), (1, 2, 0)])
def test_the_order_has_all_batches_and_lanes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int, replicas: int, workers: int
) -> None:
    monkeypatch.setattr("pl_pipe.recipes.language.shards.BLOCK_ROWS", 4)
    data = ShardBatches(shards_of(tmp_path, 2 * batches), batch_size=2, vocabulary_size=100)
    orders = [
        BlockOrder(data, replicas=replicas, rank=rank, workers=workers, shuffle=True, seed=5)
        for rank in range(replicas)
    ]
    given = [list(order) for order in orders]
    assert (
        [len(order) for order in orders] == [len(numbers) for numbers in given] == [-(-batches // replicas)] * replicas
    )
    assert {number for numbers in given for number in numbers} == set(range(batches))
    assert given == [list(order) for order in orders]
    for order in orders:
        order.set_epoch(1)
    again = [list(order) for order in orders]
    assert (again != given) or batches < 3
    assert {number for numbers in again for number in numbers} == set(range(batches))
    lanes = [numbers[worker :: max(1, workers)] for numbers in given for worker in range(max(1, workers))]
    full = [{number // 2 for number in lane[: batches // 2 // len(lanes)]} for lane in lanes]
    assert sum(map(len, full)) == len(set().union(*full))  # while blocks last, no two processes read the same one
    still = BlockOrder(data, replicas=1, rank=0, workers=0, shuffle=False, seed=0)
    assert list(still) == list(range(batches))


def test_bad_shards_are_refused(tmp_path: Path) -> None:
    for name, message in {
        None: r"data=wiki reads files from disk; set data.root",
        "/no/such": r"data.root=/no/such does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            WikiData(root=name)
    with pytest.raises(DataError, match=r"holds no HDF5 shards .*make_shards"):
        WikiData(root=str(tmp_path))
    write_shard(tmp_path / "a.hdf5", rows=range(8), without=("segment_ids", "masked_lm_ids"))
    with pytest.raises(DataError, match=r"a.hdf5 has no segment_ids, masked_lm_ids; a shard holds input_ids"):
        WikiData(root=str(tmp_path))
    (tmp_path / "a.hdf5").write_bytes(b"no shard")
    with pytest.raises(DataError, match=r"a.hdf5 is no HDF5 file, or is damaged"):
        WikiData(root=str(tmp_path))
    write_shard(tmp_path / "a.hdf5", rows=range(0))
    with pytest.raises(DataError, match=r"a.hdf5 is empty"):
        WikiData(root=str(tmp_path))
    write_shard(tmp_path / "a.hdf5", rows=range(8))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        for name in ("input_ids", "input_mask", "segment_ids"):
            del file[name]
            file[name] = np.zeros((8, 20), "i4")
    write_shard(tmp_path / "b.hdf5", rows=range(8))
    with pytest.raises(DataError, match=r"b.hdf5 has rows of other lengths \(16 tokens, 3 masked\) than .*a.hdf5 \(20"):
        WikiData(root=str(tmp_path))
    (tmp_path / "a.hdf5").rename(tmp_path / "val_a.hdf5")
    (tmp_path / "b.hdf5").unlink()
    with pytest.raises(DataError, match=r"has shards for validation only \(val_a.hdf5, …\)"):
        WikiData(root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("segment_ids", None, r"a.hdf5 has segment_ids as a group, not as a table"),
        ("segment_ids", np.zeros((8, 16), "f4"), r"a.hdf5 has segment_ids as float32, not as whole numbers"),
        ("segment_ids", np.zeros((8, 9), "i1"), r"has rows of 16 input_ids and 9 segment_ids, which must be as many"),
        ("masked_lm_ids", np.zeros((8, 2), "i4"), r"rows of 3 masked_lm_positions and 2 masked_lm_ids"),
        ("masked_lm_positions", np.full((8, 3), 16), r"holds 16 in masked_lm_positions, which goes from 0 to 15; make"),
        ("input_ids", np.full((8, 16), -5), r"holds -5 in input_ids, which goes from 0 on"),
        ("segment_ids", np.full((8, 16), 3), r"holds 3 in segment_ids, which goes from 0 to 1"),
        ("next_sentence_labels", np.full(8, 2), r"holds 2 in next_sentence_labels, which goes from 0 to 1"),
    ],
)
def test_what_a_shard_cannot_hold_is_told(tmp_path: Path, name: str, values: Any, message: str) -> None:
    write_shard(tmp_path / "a.hdf5", rows=range(8))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        del file[name]
        if values is None:
            file.create_group(name)
        else:
            file[name] = values
    with pytest.raises(DataError, match=message):
        ShardBatches(Shards([tmp_path / "a.hdf5"]), batch_size=5, vocabulary_size=100)[0]


def test_ids_beyond_the_vocabulary_are_refused_with_their_file(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=range(200))
    data = WikiData(root=str(tmp_path), vocabulary_size=214, num_workers=0, batch_size=100)
    data.setup("fit")
    with pytest.raises(DataError, match=r"a.hdf5 holds the token id 214, the vocabulary has 214 tokens"):
        list(data.val_dataloader()), list(data.train_dataloader())


def test_without_validation_shards_the_last_rows_validate(tmp_path: Path) -> None:
    write_shard(tmp_path / "vault.hdf5", rows=range(50))  # its name begins like val, and is none
    data = WikiData(root=str(tmp_path), vocabulary_size=100, num_workers=0, batch_size=8, val_share=0.1)
    data.setup("fit")
    rows = [[int(row) for batch in loader for row in batch["input_ids"][:, 0]] for loader in (
        data.train_dataloader(), data.val_dataloader())]  # fmt: skip
    assert sorted(rows[0]) == list(range(45))
    assert rows[1] == list(range(45, 50))


# ---- text for language models


def test_the_embedded_prose_is_cut_into_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path))
    data = LanguageModelText(unit="character", vocabulary_size=80, sequence_length=10, batch_size=7)
    data.prepare_data()
    kept = sorted((tmp_path / "text").iterdir())
    assert len(kept) == 4, "three rows of numbers, and the list that they follow"
    data.setup("fit")
    assert sorted((tmp_path / "text").iterdir()) == kept
    for tokens, following in data.val_dataloader():
        assert torch.equal(tokens[:, 1:], following[:, :-1])
        assert tokens.dtype == torch.int64
    single = data.train_set[3]
    batch = data.train_set.__getitems__([3, 4])  # type: ignore[attr-defined]
    assert torch.equal(single[0], batch[0][0])  # type: ignore[index]
    assert int(batch[1][0][-1]) == int(batch[0][1][0])
    shuffled = torch.cat([tokens for tokens, _ in data.train_dataloader()])
    assert len(shuffled) == len(data.train_set)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["word", "character"])
def test_tokens_are_numbered_by_how_frequent_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("b a b\nc b a\n")
    vocabulary = count_tokens(Part(text).lines(), unit=unit, size=5)
    assert vocabulary == ["<unk>", "<eos>"] + (["b", "a", "c"] if unit == "word" else [" ", "b", "a"])
    tokens = numbered(Part(text), frequent_tokens(Part(text), unit=unit, size=4), unit=unit)
    words = {"word": [2, 3, 2, 1, 0, 2, 3, 1], "character": [3, 2, 0, 2, 3, 1, 0, 2, 3, 2, 0, 1]}[unit]
    assert tokens.tolist() == words
    text.write_text("a a b\n")
    assert numbered(Part(text), frequent_tokens(Part(text), unit="word", size=4), unit="word").tolist() == [2, 2, 3, 1]


def test_a_checkpoint_of_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have as many words; with the run's own list the other text can be read."""
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    for name, words in (("one", "a b c d"), ("other", "d c x\r a")):
        (tmp_path / name).write_text(f"{words}\n" * 40)
    settings: dict[str, Any] = {"vocabulary_size": 6, "sequence_length": 4}
    trained = LanguageModelText(root=str(tmp_path / "one"), keep_vocabulary_in=str(tmp_path / "run"), **settings)
    state = trained.state_dict()
    LanguageModelText(root=str(tmp_path / "one"), **settings).load_state_dict(state)
    other = LanguageModelText(root=str(tmp_path / "other"), **settings)
    with pytest.raises(CheckpointError, match=r"another vocabulary \(6 tokens, .*give data.vocabulary=<vocabulary.txt"):
        other.load_state_dict(state)
    kept = tmp_path / "run" / "vocabulary.txt"
    told = LanguageModelText(root=str(tmp_path / "other"), vocabulary=str(kept), **settings)
    told.load_state_dict(state)
    told.setup("fit")
    assert told.vocabulary == ["<unk>", "<eos>", "a", "b", "c", "d"]
    assert told.val_set[0][0].tolist() == [5, 4, 0, 2]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"data.vocabulary has 6 tokens, but data.vocabulary_size=5"):
        LanguageModelText(vocabulary=str(kept), vocabulary_size=5)
    write_tokens(["a", "b"], kept)
    with pytest.raises(DataError, match=r"vocabulary.txt is no list .* begins with <unk> and <eos>, but with 'a', 'b'"):
        LanguageModelText(vocabulary=str(kept))
    with pytest.raises(DataError, match=r"data.vocabulary=.*nowhere is no file"):
        LanguageModelText(vocabulary=str(tmp_path / "nowhere"))


def test_wikitexts_files_are_found_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"has no wiki.train.tokens or wiki.train.raw or train.txt"):
        LanguageModelText(root=str(tmp_path))
    (tmp_path / "wiki.train.tokens").write_text(" = Title = \n\n the cat sat . \n" * 20)
    with pytest.raises(DataError, match=r"but no wiki.valid.tokens, wiki.test.tokens"):
        LanguageModelText(root=str(tmp_path))
    (tmp_path / "wiki.valid.tokens").write_text("the dog sat . \n" * 5)
    (tmp_path / "wiki.test.tokens").write_text("the\n")
    data = LanguageModelText(root=str(tmp_path), sequence_length=4, vocabulary_size=50)
    with pytest.raises(DataError, match=r"wiki.test.tokens .* has 2 tokens, a sequence needs 5"):
        data.setup("fit")
    (tmp_path / "wiki.test.tokens").write_text("the cat sat .\n" * 2)
    data.setup("fit")
    assert data.val_set[0][0].tolist() == [data.test_set[0][0][0].item(), 0, *data.test_set[0][0][2:].tolist()]  # type: ignore[index]
    (tmp_path / "short.txt").write_text("few\nlines\n")
    with pytest.raises(DataError, match=r"short.txt has 2 lines, too few"):
        LanguageModelText(root=str(tmp_path / "short.txt"))
    with pytest.raises(ConfigError, match=r"data.unit=byte is unknown; choose one of word, character"):
        LanguageModelText(unit="byte")
