"""Text files read line by line, plain or gzip: nothing is held but the line. An error tells the file and the line."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pl_pipe.errors import DataError

_GZIP = b"\x1f\x8b"


def lines_of(path: Path) -> Iterator[str]:
    """Lines without their ends. Only `\\n` ends one: text has other signs that Python would take for it.

    The mark that some editors put before the first one is none of the text.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file; give a text file, plain or .gz")
    number = 0
    try:
        with _opened(path) as file:
            for line in file:
                number += 1
                yield line.decode("utf-8" if number > 1 else "utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: byte {error.start + 1} ({error.object[error.start]:#04x}) is not UTF-8; convert "
            f"the file, as in iconv -f latin1 -t utf-8, or mend the line"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged after line {number} ({error}); fetch it again") from error


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    with path.open("rb", buffering=1 << 20) as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if packed else file
