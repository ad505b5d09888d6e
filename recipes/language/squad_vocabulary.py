"""A vocabulary of SQuAD's words, for those who start from no model. JSON -> *vocab.txt* -> data.vocabulary."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..preparation.report import Report, Silence
from .squad_format import read_questions
from .vocabulary import train_vocabulary, write_vocabulary


def build_vocabulary(
    files: Sequence[Path], folder: Path, *, size: int = 30_522, cased: bool = False, report: Report | None = None
) -> Sequence[Path]:
    """The step of `pl-pipe data prepare` after the files: `vocab.txt` of the first one's paragraphs and questions.

    One that lies there already stays: it may be that of the weights which training is to start from.
    """
    report, own = report or Silence(), folder / "vocab.txt"
    if own.is_file():
        report.say(f"{own} is there already and stays as it is")
        return [own]
    with report.bar(f"learning {size} subwords", None):
        setting = "prepare.vocabulary.settings.size"
        words = train_vocabulary(_texts(files[0]), size=size, lowercase=not cased, quiet=True, setting=setting)
    write_vocabulary(words, own)
    return [own]


def _texts(path: Path) -> Iterator[str]:
    """Each paragraph once, and all questions."""
    before = None
    for question in read_questions(path, skip_misplaced=True).all:
        if question.context != before:
            before = question.context
            yield before
        yield question.text
