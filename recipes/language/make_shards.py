"""`python -m pl_pipe.recipes.language.make_shards corpus.txt --out shards --vocabulary vocab.txt`: pre-training shards.

The text has one or more sentences a line, and an empty line between documents.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pl_pipe.errors import DataError, PlPipeError

from .instances import InstanceRule, Tally
from .shard_writer import check_shares, make_shards, own_vocabulary, refuse_present
from .vocabulary import read_vocabulary


def run(
    texts: Annotated[list[Path], typer.Argument(help="Text files, plain or .gz.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    vocabulary: Annotated[Path | None, typer.Option(help="WordPiece vocab.txt; without it one is trained.")] = None,
    vocabulary_size: Annotated[int, typer.Option(help="Tokens of a trained vocabulary.")] = 30522,
    vocabulary_documents: Annotated[int, typer.Option(help="Documents, from the first, that it is trained on.")] = (
        1_000_000
    ),
    cased: Annotated[bool, typer.Option(help="Keep upper case.")] = False,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    most_masked: Annotated[int, typer.Option(help="Masked words of a sequence at most.")] = 20,
    copies: Annotated[int, typer.Option(help="How often the text is used, with other masks.")] = 1,
    shards: Annotated[int, typer.Option(help="Files for training; each must fit into memory.")] = 16,
    validation_share: Annotated[float, typer.Option(help="Share of the documents for validation.")] = 0.01,
    compress: Annotated[bool, typer.Option(help="Files a third as large, and slower to read.")] = False,
    seed: Annotated[int, typer.Option(help="Of cuts, masks and order.")] = 0,
) -> None:
    """Make HDF5 shards for BERT's pre-training from plain text."""
    console = Console(stderr=True)
    rule = InstanceRule(sequence_length, most_masked, copies=copies)
    check_shares(shards=shards, validation_share=validation_share)
    refuse_present(out)
    if vocabulary is None:
        own = out / "vocab.txt"
        if own.exists():
            raise DataError(f"{own} exists already; use it by --vocabulary {own}, or choose another folder")
        console.print(f"training a vocabulary of {vocabulary_size:,} tokens")
        words = own_vocabulary(
            texts, own, size=vocabulary_size, lowercase=not cased, documents=vocabulary_documents,
            setting="--vocabulary-size",
        )  # fmt: skip
    else:
        words = read_vocabulary(str(vocabulary), lowercase=not cased, setting="--vocabulary ")
    with console.status("reading") as status:

        def progress(tally: Tally) -> None:
            status.update(f"{tally.documents:,} documents, {tally.sequences:,} sequences")

        try:
            report = make_shards(
                texts, out, vocabulary=words, rule=rule, shards=shards, validation_share=validation_share,
                seed=seed, compress=compress, progress=progress,
            )  # fmt: skip
        except BaseException:
            if vocabulary is None:
                own.unlink()  # else the next call would find it in its way
            raise
    console.print(f"{len(report.paths)} shards in {out}: {report.tally.describe()}", soft_wrap=True)


def main() -> None:
    """One message for what the user can mend."""
    try:
        typer.run(run)
    except PlPipeError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
