"""BLEU of a translator. test corpus -> beam search -> text -> *sacrebleu*; for `pl-pipe evaluate`."""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import lightning as L
from sacrebleu.metrics.bleu import BLEU

from pl_pipe.errors import ConfigError, DataError

from ..progress import tracked
from .batches import Collate
from .beam_search import BeamSettings, beam_search
from .datamodule import TranslationData
from .translator import Translator
from .vocabulary import Vocabulary

_TOKENIZERS = ("13a", "intl", "char", "none", "zh")


class BleuEvaluation:
    """Translates the test corpus and compares with the references; leaves `translations.txt` and `bleu.json`."""

    main_metric = "BLEU"

    def __init__(
        self,
        beam_size: int = 5,
        length_normalisation: float = 0.6,
        coverage_penalty: float = 0.1,
        batch_size: int = 64,
        max_length_factor: float = 2.0,
        tokenize: str = "13a",
        limit: int | None = None,
    ) -> None:
        if beam_size < 1 or batch_size < 1 or max_length_factor <= 0 or (limit is not None and limit < 1):
            raise ConfigError(
                f"evaluation.beam_size={beam_size}, evaluation.batch_size={batch_size} and evaluation.limit={limit} "
                f"are at least 1, evaluation.max_length_factor={max_length_factor} is positive"
            )
        if length_normalisation < 0 or coverage_penalty < 0:
            raise ConfigError(
                f"evaluation.length_normalisation={length_normalisation} and evaluation.coverage_penalty="
                f"{coverage_penalty} must not be negative"
            )
        if tokenize not in _TOKENIZERS:
            raise ConfigError(f"evaluation.tokenize={tokenize} is unknown; choose one of {', '.join(_TOKENIZERS)}")
        self._beam = BeamSettings(beam_size, length_normalisation, coverage_penalty)
        self._batch_size, self._max_length_factor, self._limit = batch_size, max_length_factor, limit
        self._bleu = BLEU(tokenize=tokenize)
        self._bleu.corpus_score([""], [[""]])  # which counts the references, for its signature
        self.title = f"BLEU ({self._bleu.get_signature()}, beam {beam_size})"

    def __call__(self, model: L.LightningModule, datamodule: L.LightningDataModule, out: Path) -> dict[str, float]:
        if not isinstance(model, Translator) or not isinstance(datamodule, TranslationData):
            raise ConfigError(
                f"evaluation=bleu scores a translator on parallel text, not {type(model).__name__} on "
                f"{type(datamodule).__name__}; choose recipe=gnmt8 and data=numbers or data=parallel_text"
            )
        if "test" not in datamodule.corpora:
            raise DataError("there is nothing to translate; give data.source=<file> and data.reference=<file>")
        pairs = list(islice(datamodule.corpora["test"].pairs(), self._limit))
        if not pairs:
            raise DataError(f"{datamodule.corpora['test'].name} are empty; there is nothing to translate")
        began = time.perf_counter()
        translations = self.translate([source for source, _ in pairs], model, datamodule.vocabulary)
        seconds = time.perf_counter() - began
        references = [datamodule.vocabulary.plain(reference) for _, reference in pairs]
        score = self._bleu.corpus_score(translations, [references])
        exact = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
        (out / "translations.txt").write_text("\n".join(translations) + "\n", encoding="utf-8")
        facts = {
            "bleu": score.score, "signature": str(self._bleu.get_signature()), "detail": str(score),
            "sentences": len(pairs), "seconds": round(seconds, 3), "source": datamodule.corpora["test"].name,
            "beam_size": self._beam.size, "length_normalisation": self._beam.length_normalisation,
            "coverage_penalty": self._beam.coverage_penalty,
        }  # fmt: skip
        (out / "bleu.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return {"BLEU": score.score, "exact %": 100 * exact / len(pairs), "sentences/s": len(pairs) / seconds}

    def translate(self, lines: Sequence[str], model: Translator, vocabulary: Vocabulary) -> list[str]:
        """The translation of each line; an empty line's is empty."""
        encoded = vocabulary.encode(lines)
        order = sorted((number for number in range(len(lines)) if encoded[number]), key=lambda n: len(encoded[n]))
        results = [""] * len(lines)
        collate = Collate(multiple=1)
        batches = list(_batches(order, self._batch_size))
        for numbers in tracked(batches, "translating", count=len(batches)):
            source, lengths, _ = collate([(encoded[number], []) for number in numbers])
            found = beam_search(
                model.network,
                source.to(model.device),
                lengths.to(model.device),
                limits_N=(self._max_length_factor * lengths).long().to(model.device) + 10,
                settings=self._beam,
                tokens=vocabulary.size,
            )
            for number, ids in zip(numbers, found, strict=True):
                results[number] = vocabulary.decode(ids)
        return results


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]
