"""Tables as plain lines for a log file."""

from collections.abc import Sequence


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> list[str]:
    """One line for the headings and one a row; columns named in `left` start at the left, the others end together."""
    lines = [tuple(headings), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if heading in left else cell.rjust(width)
            for cell, width, heading in zip(line, widths, headings, strict=True)
        ).rstrip()
        for line in lines
    ]
