"""Parallel text: number words by rule, files as they are and as they should not be, vocabularies, buckets."""

import gzip
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from pl_pipe.errors import CheckpointError, ConfigError, DataError
from pl_pipe.recipes.text_file import lines_of
from pl_pipe.recipes.translation import batches
from pl_pipe.recipes.translation import vocabulary as vocabulary_module
from pl_pipe.recipes.translation.batches import BucketSampler, Collate
from pl_pipe.recipes.translation.corpus import TextPair
from pl_pipe.recipes.translation.datamodule import TranslationData
from pl_pipe.recipes.translation.encoded import EncodedPairs, encode, read_encoded
from pl_pipe.recipes.translation.moses import detokenize
from pl_pipe.recipes.translation.numbers import NumberLists, english, german, numbers_data, split_numbers
from pl_pipe.recipes.translation.parallel_text import parallel_text_data
from pl_pipe.recipes.translation.special_ids import BEGIN, END, PAD, UNKNOWN
from pl_pipe.recipes.translation.translator import Translator
from pl_pipe.recipes.translation.vocabulary import ListedVocabulary, SubwordVocabulary, read_vocabulary, vocabulary_of

ENGLISH = ["A dog runs.", "Two cats – asleep!", "It’s “fine”, isn’t it?", "3,000 people"]
GERMAN = ["Ein Hund läuft.", "Zwei Katzen schlafen!", "Es ist „gut“, oder?", "3.000 Menschen 🐕"]


def written(folder: Path, name: str, lines: list[str], *, packed: bool = False) -> Path:
    content = ("\n".join(lines) + "\n").encode()
    path = folder / f"{name}.gz" if packed else folder / name
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def corpus(folder: Path, source: list[str] = ENGLISH, target: list[str] = GERMAN) -> TextPair:
    return TextPair(written(folder, "some.en", source), written(folder, "some.de", target))


def listed(*extra: str) -> ListedVocabulary:
    return ListedVocabulary(["a", "b", "c", "wer@@", "de", *extra])


# ---- numbers


def test_number_words() -> None:
    words = {
        0: ("zero", "null"), 1: ("one", "eins"), 16: ("sixteen", "sechzehn"), 17: ("seventeen", "siebzehn"),
        21: ("twenty-one", "einundzwanzig"), 30: ("thirty", "dreißig"), 66: ("sixty-six", "sechsundsechzig"),
        100: ("one hundred", "einhundert"), 101: ("one hundred one", "einhunderteins"),
        121: ("one hundred twenty-one", "einhunderteinundzwanzig"), 712: ("seven hundred twelve", "siebenhundertzwölf"),
        1000: ("one thousand", "eintausend"), 1001: ("one thousand one", "eintausendeins"),
        21_000: ("twenty-one thousand", "einundzwanzigtausend"),
        101_101: ("one hundred one thousand one hundred one", "einhunderteintausendeinhunderteins"),
    }  # fmt: skip
    assert {number: (english(number), german(number)) for number in words} == words
    for language in (english, german):
        assert len({language(number) for number in range(12_000)}) == 12_000


def test_no_number_is_in_two_splits(tmp_path: Path) -> None:
    data = numbers_data(cache=str(tmp_path), sentences=2000)
    seen = {}
    for split, found in data.corpora.items():
        pairs = list(found.pairs())
        assert pairs == list(found.pairs())
        seen[split] = {word for _, target in pairs for word in target.split(", ")}
        for source, target in pairs[:50]:
            assert len(source.split(", ")) == len(target.split(", ")) <= 3
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]
    assert len(seen["test"]) > 80
    assert {"null", "zwanzig", "neunhundert"} <= seen["train"], "the parts of all words are for training"


@pytest.mark.parametrize(
    "wrong", [{"largest": 50}, {"largest": 10**7}, {"longest": 0}, {"held_out": 0.6}, {"held_out": 0.0}], ids=str
)
def test_numbers_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"data.{next(iter(wrong))}="):
        numbers_data(**wrong)  # type: ignore[arg-type]


# ---- files


def test_other_numbers_have_another_fingerprint() -> None:
    """Also where they are as many and the largest is the same: encoded corpora are found again by it."""
    found = {
        largest: NumberLists("test", split_numbers(largest, 0.1, 0)["test"], 500, 1, 3, 0)
        for largest in range(300, 420)
    }
    for one, other in pairwise(found.values()):
        assert (one.fingerprint == other.fingerprint) is (one.numbers == other.numbers)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_lines_end_at_line_feeds_alone(tmp_path: Path, packed: bool) -> None:
    lines = ["first\r", "", " spaced  ", "a\u2028b\x0bc\x85d", "ä" * 100_000]
    path = written(tmp_path, "text", lines, packed=packed)
    assert list(lines_of(path)) == [line.rstrip("\r") for line in lines]
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb")
    assert list(lines_of(path)) == ["a", "\ufeffb"], "a mark before the text is none of it"


@pytest.mark.parametrize(("source", "target"), [(3, 5), (5, 3)])
def test_unequal_line_counts_are_told(tmp_path: Path, source: int, target: int) -> None:
    pair = corpus(tmp_path, ["x"] * source, ["y"] * target)
    with pytest.raises(DataError, match=rf"some.en has {source} lines, but .*some.de has {target}"):
        list(pair.pairs())


def test_invalid_utf8_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"fine\nalso fine\nf\xfcnf\n")
    with pytest.raises(DataError, match=r"text, line 3: byte 2 \(0xfc\) is not UTF-8"):
        list(lines_of(path))


def test_a_cut_archive_and_an_absent_file_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, "text", ["line"] * 1000, packed=True)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="is damaged after line"):
        list(lines_of(path))
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        list(TextPair(tmp_path / "nowhere", path).pairs())


# ---- vocabularies


def test_any_text_comes_back() -> None:
    vocabulary = SubwordVocabulary.trained(ENGLISH + GERMAN, size=300)
    assert vocabulary.size == 300
    for line in [*ENGLISH, *GERMAN, "never seen: ☃ Übermut"]:
        (ids,) = vocabulary.encode([line])
        assert all(number > END for number in ids)
        assert vocabulary.decode([BEGIN, *ids, END, PAD]) == line
    again = vocabulary_of(vocabulary.text(), where="here")
    assert again.encode(ENGLISH) == vocabulary.encode(ENGLISH)
    assert SubwordVocabulary.trained(ENGLISH + GERMAN, size=300).text() == vocabulary.text()


@pytest.mark.parametrize("remembered", [5, 200_000])
def test_words_are_encoded_as_their_line_is(remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's answer for whole lines is the oracle; white space of all kinds stands between the words."""
    monkeypatch.setattr(vocabulary_module, "_REMEMBERED_WORDS", remembered)
    vocabulary = SubwordVocabulary.trained(ENGLISH + GERMAN, size=320)
    draw = random.Random(0)
    words = [*" ".join(ENGLISH + GERMAN).split(), "it's", "'s", "...", "(a)", "12a,", "\u200b", "🐕🐕"]
    lines = [""]
    for _ in range(300):
        gaps = [" "] if draw.random() < 0.6 else [" ", "  ", "\t", "\xa0", " \xa0", "\u2028"]
        line = "".join(draw.choice(words) + draw.choice(gaps) for _ in range(draw.randint(1, 8)))
        lines.append(line if draw.random() < 0.2 else line.strip())
    for start in range(0, len(lines), 50):
        block = lines[start : start + 50]
        expected = [encoding.ids for encoding in vocabulary._tokenizer.encode_batch(block, add_special_tokens=False)]
        assert vocabulary.encode(block) == expected


def test_listed_tokens_make_words() -> None:
    vocabulary = vocabulary_of("<unk>\n<s>\n</s>\na 12\nwer@@ 7\nde 3\n&apos;s 2\n@-@ 1\n. 1\n", where="here")
    assert vocabulary.encode(["wer@@ de a nothing"]) == [[5, 6, 4, UNKNOWN]]
    assert vocabulary.decode([5, 6, 4, 7, 9]) == "werde a's."
    assert vocabulary.plain("wer@@ de @-@ a &apos;s .") == "werde-a's."
    assert vocabulary_of(vocabulary.text(), where="here").encode(["a de"]) == [[4, 6]]
    odd = ListedVocabulary(["a\u2028b", "c\xa0d"])  # signs that Python takes for ends of lines and for spaces
    assert vocabulary_of(odd.text(), where="here").encode(["c\xa0d  a\u2028b"]) == [[5, 4]]


def test_signs_of_the_vocabulary_in_a_text_are_words() -> None:
    """Else a sentence that speaks of `</s>` would end there."""
    trained = SubwordVocabulary.trained(ENGLISH, size=300)
    for line in ("the </s> dog", "a <pad> b <s> c", "</s>"):
        (ids,) = trained.encode([line])
        assert not {PAD, UNKNOWN, BEGIN, END} & set(ids)
        assert trained.decode(ids) == line
    again = vocabulary_of(trained.text(), where="here")
    assert again.encode(["the </s> dog"]) == trained.encode(["the </s> dog"])
    assert listed().encode(["a </s> <pad> <s> <unk> b"]) == [[4, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 5]]


def test_a_list_may_begin_with_a_brace(tmp_path: Path) -> None:
    assert vocabulary_of("{\n}\nab\n", where="here").encode(["ab {"]) == [[6, 4]]
    with pytest.raises(DataError, match="here is no vocabulary of the tokenizers library"):
        vocabulary_of(SubwordVocabulary.trained(ENGLISH, size=300).text()[:200], where="here")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfab\r\nc\r\n")
    assert read_vocabulary(tmp_path / "marked").encode(["ab c"]) == [[4, 5]]


def test_moses_tokens_become_text() -> None:
    for tokens, text in {
        "Hello , world !": "Hello, world!",
        "( see [ 1 ] ) .": "(see [1]).",
        "it &apos;s 5 @-@ fold &amp; more": "it's 5-fold & more",
        "he said &quot; no &quot; twice .": 'he said "no" twice.',
        "„ Guten Tag “ , sagte er .": "„Guten Tag“, sagte er.",
        "I don &apos;t , he &apos;ll": "I don't, he'll",
        "": "",
    }.items():
        assert detokenize(tokens) == text


def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.vocabulary=.*nowhere does not exist"):
        read_vocabulary(tmp_path / "nowhere")
    for content, says in ((b'{"a": 1}', "is no vocabulary"), (b"\xff\xfe", "is not UTF-8")):
        (tmp_path / "wrong").write_bytes(content)
        with pytest.raises(DataError, match=says):
            read_vocabulary(tmp_path / "wrong")
    with pytest.raises(ConfigError, match=r"data.vocabulary_size=100 leaves no room"):
        SubwordVocabulary.trained(ENGLISH, size=100)


# ---- encoded corpora


def test_what_is_left_out_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = corpus(tmp_path, ["a b", "", "a b c a", "c", "b", "a"], ["a", "b", "c", " ", "b c", "a b a b"])
    folder = encode(pair, listed(), max_length=3, cache=tmp_path / "cache")
    pairs, facts = read_encoded(folder)
    assert (facts.pairs, facts.too_long, facts.empty) == (2, 2, 2)
    assert [[side.tolist() for side in pairs[number]] for number in range(len(pairs))] == [[[4, 5], [4]], [[5], [5, 6]]]
    (tmp_path / "words.txt").write_text("a\nb\nc\n")
    for _ in range(2):  # the second run finds them encoded, and its user wants to know as well
        caplog.clear()
        data = TranslationData(
            {"train": pair}, vocabulary=str(tmp_path / "words.txt"), max_length=3, cache=str(tmp_path / "runs")
        )
        with caplog.at_level("WARNING"):
            data.train_dataloader()
        assert "2 of 6 pairs (33.33 %)" in caplog.text
        assert "data.max_length=3" in caplog.text
        assert "2 of 6 pairs of" in caplog.text
    with pytest.raises(DataError, match=r"hold no pair to train with: of 6, 4 are longer than data.max_length=0"):
        encode(pair, listed(), max_length=0, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".encoding*"))


def test_a_list_of_other_files_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "words.txt").write_text("a\nb\n")
    for lines, told in ((["a b x a b"] * 2, True), (["a b a b"] * 2, False)):
        caplog.clear()
        data = TranslationData(
            {"train": corpus(tmp_path, lines, lines)}, vocabulary=str(tmp_path / "words.txt"), cache=str(tmp_path / "c")
        )
        with caplog.at_level("WARNING"):
            data.train_dataloader()
        assert ("20.0 % of the tokens of" in caplog.text) is told


def test_an_encoded_corpus_is_made_anew_when_the_text_is_new(tmp_path: Path) -> None:
    first = encode(corpus(tmp_path, ["a"], ["b"]), listed(), max_length=9, cache=tmp_path / "cache")
    made = (first / "facts.json").stat().st_mtime_ns
    assert (
        encode(TextPair(tmp_path / "some.en", tmp_path / "some.de"), listed(), max_length=9, cache=first.parent)
        == first
    )
    assert (first / "facts.json").stat().st_mtime_ns == made
    assert encode(corpus(tmp_path, ["a b"], ["b c"]), listed(), max_length=9, cache=first.parent) != first
    assert encode(corpus(tmp_path, ["a"], ["b"]), listed("d"), max_length=9, cache=first.parent) != first


def in_memory(lengths: list[tuple[int, int]]) -> EncodedPairs:
    ids, ends = [], []
    for side in range(2):
        counts = [pair[side] for pair in lengths]
        ids.append(np.arange(4, 4 + sum(counts)).astype(np.int32))
        ends.append(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    return EncodedPairs((ids[0], ids[1]), (ends[0], ends[1]))


def test_a_batch_is_padded_to_multiples() -> None:
    pairs = in_memory([(3, 1), (1, 8), (2, 2)])
    chosen = pairs.__getitems__([2, 0, 1])
    for found, number in zip(chosen, [2, 0, 1], strict=True):
        assert [side.tolist() for side in found] == [side.tolist() for side in pairs[number]]
    source, lengths, target = Collate(4)(chosen)
    assert (source.shape, target.shape) == ((3, 4), (3, 13))
    assert source.tolist() == [[8, 9, END, PAD], [4, 5, 6, END], [7, END, PAD, PAD]]
    assert lengths.tolist() == [3, 4, 2]
    assert target[0].tolist() == [BEGIN, 13, 14, END] + [PAD] * 9
    assert target[2].tolist() == [BEGIN, *range(5, 13), END, PAD, PAD, PAD]
    assert source.dtype == target.dtype == torch.int64


def random_pairs(count: int, seed: int = 0) -> EncodedPairs:
    draw = np.random.default_rng(seed)
    source = draw.integers(1, 40, count)
    return in_memory(list(zip(source.tolist(), (source + draw.integers(0, 5, count)).tolist(), strict=True)))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [10, 64, 1000, 1003])
def test_every_sentence_comes_once_an_epoch(count: int, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_BLOCK_SENTENCES", 16)
    monkeypatch.setattr(batches, "_POOL_BLOCKS", 8)  # so that a corpus of 1,000 has several pools
    pairs = random_pairs(count)
    settings = {"batch_size": 8, "multiple": 8, "seed": 3, "num_replicas": replicas}
    shares = [BucketSampler(pairs, rank=rank, **settings) for rank in range(replicas)]  # type: ignore[arg-type]
    orders = [list(share) for share in shares]
    assert {len(order) for order in orders} == {-(-count // replicas)} == {len(shares[0])}
    dealt = [number for order in orders for number in order]
    assert set(dealt) == set(range(count))
    assert len(dealt) - count < replicas
    assert [list(share) for share in shares] == orders
    for share in shares:
        share.set_epoch(1)
    assert [list(share) for share in shares] != orders


def test_sentences_of_like_length_stand_together() -> None:
    pairs = random_pairs(4000)
    order = list(BucketSampler(pairs, batch_size=32, multiple=8, seed=0))

    def padded(numbers: list[int]) -> int:
        chunks = [numbers[start : start + 32] for start in range(0, len(numbers), 32)]
        return sum(32 * max(len(pairs[number][0]) for number in chunk) for chunk in chunks)

    words = sum(len(pairs[number][0]) for number in range(4000))
    assert padded(order) < 1.25 * words
    assert padded(list(range(4000))) > 1.7 * words
    shapes = {
        tuple(tuple(tensor.shape) for tensor in Collate(8)(pairs.__getitems__(order[start : start + 32])))
        for start in range(0, 4000, 32)
    }
    assert len(shapes) < 20


# ---- the data module


def folder_of(tmp_path: Path, *, packed: bool = False) -> Path:
    for split in ("train", "val", "test"):
        written(tmp_path, f"{split}.en", ENGLISH * 3, packed=packed)
        written(tmp_path, f"{split}.de", GERMAN * 3, packed=packed)
    return tmp_path


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_folder_becomes_batches(tmp_path: Path, packed: bool) -> None:
    root = folder_of(tmp_path, packed=packed)
    kept = tmp_path / "run"
    data = parallel_text_data(
        root=str(root), vocabulary_size=300, batch_size=5, cache=str(tmp_path / "cache"), keep_vocabulary_in=str(kept)
    )
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    loaded = list(data.train_dataloader())
    assert [len(source) for source, _, _ in loaded] == [5, 5, 2]
    texts = sorted(data.vocabulary.decode(row.tolist()) for source, _, _ in loaded for row in source)
    assert texts == sorted(ENGLISH * 3)
    assert data.vocabulary.decode(next(iter(data.test_dataloader()))[2][1].tolist()) == GERMAN[1]
    assert not kept.exists(), "a run that saves nothing leaves nothing"
    data.state_dict()
    assert read_vocabulary(kept / "vocabulary.json").text() == data.vocabulary.text()


def test_a_checkpoint_brings_its_vocabulary_or_is_refused(tmp_path: Path) -> None:
    root = folder_of(tmp_path)
    trained = parallel_text_data(root=str(root), vocabulary_size=300, cache=str(tmp_path / "cache"))
    trained.prepare_data()
    state = trained.state_dict()
    files = {"source": str(root / "test.en"), "reference": str(root / "test.de")}
    bare = parallel_text_data(**files, vocabulary_size=300, cache=str(tmp_path / "cache"))  # type: ignore[arg-type]
    bare.load_state_dict(state)
    assert bare.vocabulary.text() == state["vocabulary"]
    bare.load_state_dict(state)
    other = numbers_data(vocabulary_size=300, cache=str(tmp_path / "cache"))
    other.train_dataloader()  # has read its data, so it has a vocabulary
    with pytest.raises(CheckpointError, match=r"trained with another vocabulary \(300 tokens"):
        other.load_state_dict(state)
    small = parallel_text_data(**files, vocabulary_size=280)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has 300 tokens, but data.vocabulary_size=280"):
        small.load_state_dict(state)
    with pytest.raises(DataError, match="neither a vocabulary nor a training corpus"):
        _ = parallel_text_data(**files).vocabulary  # type: ignore[arg-type]


def test_pretokenised_files(tmp_path: Path) -> None:
    for split in ("train", "val"):
        written(tmp_path, f"{split}.bpe.en", ["a b", "wer@@ de c"])
        written(tmp_path, f"{split}.bpe.de", ["b", "wer@@ wer@@ de"])
    vocabulary = written(tmp_path, "vocab.bpe", listed().tokens[4:])
    data = parallel_text_data(
        root=str(tmp_path), train="train.bpe", val="val.bpe", vocabulary=str(vocabulary), pretokenized=True,
        cache=str(tmp_path / "cache"), keep_vocabulary_in=str(tmp_path / "run"),
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    source, _, target = next(iter(data.val_dataloader()))
    assert source[1, :4].tolist() == [7, 8, 6, END]
    assert data.vocabulary.decode(target[1].tolist()) == "werwerde"
    data.state_dict()
    assert (tmp_path / "run" / "vocabulary.txt").is_file()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no text was named; data.root="),
        ({"source": "x"}, "data.source is set and data.reference is not"),
        ({"root": "nowhere"}, "data.root=nowhere is not a folder"),
        ({"root": "ROOT", "train": "trian"}, "has no trian.en and no trian.de"),
        ({"root": "ROOT", "target_language": "fr"}, "has no train.fr"),
        ({"root": "ROOT", "pretokenized": True}, "needs data.vocabulary="),
        ({"root": "ROOT", "batch_size": 0}, "data.batch_size=0 is too small"),
        ({"root": "ROOT", "num_workers": -1}, "data.num_workers=-1 is too small"),
        ({"root": "ROOT", "order_seed": -1}, "data.order_seed=-1 is too small"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(tmp_path: Path, settings: dict[str, object], says: str) -> None:
    given = {name: str(folder_of(tmp_path)) if value == "ROOT" else value for name, value in settings.items()}
    with pytest.raises((ConfigError, DataError), match=says):
        parallel_text_data(**given)  # type: ignore[arg-type]


def test_a_missing_split_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    data = TranslationData({"train": corpus(tmp_path)}, vocabulary_size=300, cache=str(tmp_path / "cache"))
    data.setup("fit")
    with pytest.raises(DataError, match="the data set has no val corpus"):
        data.val_dataloader()


def quiet_trainer(folder: Path, **settings: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **settings,
    )  # fmt: skip


def test_training_goes_without_validation_and_a_checkpoint_brings_its_vocabulary_to_a_test(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no files for validation; to test there are no files for training, and Lightning loads after `setup`."""
    root = folder_of(tmp_path)
    for language in ("en", "de"):
        (root / f"val.{language}").unlink(missing_ok=True)
    text: dict[str, Any] = {"vocabulary_size": 300, "batch_size": 6, "cache": str(tmp_path / "cache")}
    model = Translator(300, encoder_layers=2, decoder_layers=2, hidden_size=8)
    trainer = quiet_trainer(tmp_path)
    with caplog.at_level("WARNING"):
        trainer.fit(model, datamodule=parallel_text_data(root=str(root), **text))
    assert trainer.global_step == 2
    assert "there is no val corpus: training goes without validation" in caplog.text
    files = {"source": str(root / "test.en"), "reference": str(root / "test.de")}
    saved = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    data = parallel_text_data(**files, **text)
    (metrics,) = quiet_trainer(tmp_path).test(model, datamodule=data, ckpt_path=saved, verbose=False)
    assert metrics["test_token_loss"] > 0
    with pytest.raises(DataError, match="neither a vocabulary nor a training corpus"):
        quiet_trainer(tmp_path).test(model, datamodule=parallel_text_data(**files, **text), verbose=False)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'pl-pipe\[text\]'"):
        SubwordVocabulary.trained(ENGLISH, size=300)
