"""Downloads that go on where they broke off. url -> *FILE.part*, checked -> FILE.

GET, Range: bytes=n-   ──► 206: append        200: the server cannot, or has another file: from the start
                           416: there is no more; what is here is checked
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pl_pipe.errors import DataError
from pl_pipe.units import format_bytes

from .report import Report
from .source import Source, digest_of
from .space import check_space

_CHUNK = 1 << 18
_GONE_FOR_GOOD = range(400, 500)  # asking again does not help
_ASK_AGAIN = (408, 429)


class UnreachableError(DataError):
    """No server answered: the machine may be offline."""


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for, and how often it is asked again."""

    timeout_s: float = 30.0
    retries: int = 4
    pause_s: float = 2.0
    """Before the first repetition; each further one waits twice as long."""


def download(source: Source, folder: Path, report: Report, *, patience: Patience, verify: bool = True) -> Path:
    """The checked file in `folder`; a broken download keeps what came, and the next call goes on from there."""
    assert source.url is not None
    part = folder / f"{source.file}.part"
    resumed = part.exists() and part.stat().st_size > 0
    _fetch(source, part, report, patience, verify=verify)
    problem = _problem(source, part, report) if verify else None
    if problem is not None and resumed:  # the beginning may be of another version of the file
        report.say(f"{source.file} does not fit together ({problem}); fetching it from the start")
        _forget(part)
        _fetch(source, part, report, patience, verify=verify)
        problem = _problem(source, part, report)
    if problem is not None:
        _forget(part)
        raise DataError(
            f"{source.url} gave a file with {problem}; it was not kept. Run the command again, fetch the file by hand, "
            f"or set prepare.verify=false if you trust the server more than this sum"
        )
    target = folder / source.file
    part.replace(target)
    _tag_file(part).unlink(missing_ok=True)
    return target


def fetch_text(url: str, *, patience: Patience) -> str:
    """A small text, such as a list of sums."""
    try:
        with _opened(url, {}, patience) as response:
            body: bytes = response.read()
    except (_CutError, http.client.HTTPException, OSError) as error:
        raise UnreachableError(f"{url} could not be read ({error})") from error
    return body.decode(errors="replace")


def _problem(source: Source, path: Path, report: Report) -> str | None:
    """What is wrong with a file that has come."""
    if source.sum is None:
        return None
    algorithm, expected = source.sum
    found = digest_of(path, algorithm, report)
    return None if found == expected else f"{algorithm} {found}, expected {expected}"


def _fetch(source: Source, part: Path, report: Report, patience: Patience, *, verify: bool) -> None:
    """Asks again after a cut connection; every attempt goes on where the last one ended."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch_once(source, part, report, patience, verify=verify)
            return
        except _CutError as error:
            came = part.stat().st_size if part.exists() else 0
            failures = 0 if came > before else failures + 1
            if failures > patience.retries:
                raise UnreachableError(
                    f"the connection to {source.host} broke {failures} times ({error}); "
                    f"{format_bytes(came)} are kept in {part}: run the command again to go on from there"
                ) from error
            report.say(f"{source.file}: {error}; going on from {format_bytes(came)}")
            time.sleep(patience.pause_s * 2 ** max(failures - 1, 0))


class _CutError(Exception):
    """The connection ended before the file did."""


def _fetch_once(source: Source, part: Path, report: Report, patience: Patience, *, verify: bool) -> None:
    assert source.url is not None
    start = part.stat().st_size if part.exists() else 0
    headers = {}
    if start:
        headers["Range"] = f"bytes={start}-"
        if _tag_file(part).exists():
            headers["If-Range"] = _tag_file(part).read_text()
    try:
        with _opened(source.url, headers, patience) as response:
            if response.status != 206 or not _begins_at(response, start):
                start = 0
            total = _total(response, start)
            if verify:
                _check_size(source, total)
            check_space(part.parent, (total or 0) - start, what=f"downloading {source.file}")
            _keep_tag(part, response)
            with (
                part.open("ab" if start else "wb") as file,
                report.bar(f"fetching {source.file}", total) as advance,
            ):
                advance(start)
                _copy(response, file.write, advance)
    except urllib.error.HTTPError as error:
        whole = str(error.headers.get("Content-Range", "")).rpartition("/")[2]
        if whole == str(start):
            return  # nothing is missing
        _forget(part)
        raise _CutError(f"the server's file has {whole or 'fewer'} bytes, {start} are here") from error
    size = part.stat().st_size
    if total is not None and size != total:
        raise _CutError(f"the connection ended after {format_bytes(size)} of {format_bytes(total)}")


def _copy(response: Any, write: Callable[[bytes], object], advance: Callable[[int], None]) -> None:
    try:
        while chunk := response.read(_CHUNK):
            write(chunk)
            advance(len(chunk))
    except http.client.IncompleteRead as error:
        write(error.partial)
        raise _CutError("the connection ended early") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _CutError(str(error) or type(error).__name__) from error


def _opened(url: str, headers: dict[str, str], patience: Patience) -> Any:
    """The response; what a server or the network answers instead becomes an error that says what to do."""
    given = {"User-Agent": "pl-pipe", "Accept-Encoding": "identity", **headers}
    host = urlsplit(url).hostname
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=given), timeout=patience.timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 416 and "Range" in headers:
            raise
        if error.code in _GONE_FOR_GOOD and error.code not in _ASK_AGAIN:
            raise DataError(
                f"{host} answers {error.code} ({error.reason}) for {url}; the file has moved or needs a login: "
                f"fetch it by hand, or set prepare.mirror to a server that has it"
            ) from error
        raise _CutError(f"{host} answers {error.code} ({error.reason})") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _CutError(f"{host} did not answer within {patience.timeout_s:g} s") from error
        raise UnreachableError(f"{host} cannot be reached ({error.reason})") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _CutError(f"{host}: {str(error) or type(error).__name__}") from error


def _check_size(source: Source, total: int | None) -> None:
    if source.size_bytes is not None and total is not None and total != source.size_bytes:
        raise DataError(
            f"{source.url} has {total} bytes, expected {source.size_bytes}; the server has another file: fetch it by "
            f"hand, set prepare.mirror to a server that has the right one, or prepare.verify=false to take this one"
        )


def _begins_at(response: Any, start: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-")


def _total(response: Any, start: int) -> int | None:
    length = response.headers.get("Content-Length")
    return None if length is None else start + int(length)


def _tag_file(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def _keep_tag(part: Path, response: Any) -> None:
    """The server's name for this version of the file: a resumed download must be of the same one."""
    tag = response.headers.get("ETag") or ""
    if tag and not tag.startswith("W/"):
        _tag_file(part).write_text(tag)
    elif response.headers.get("Last-Modified"):
        _tag_file(part).write_text(response.headers["Last-Modified"])


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_file(part).unlink(missing_ok=True)
