"""A file that a data set is made of: where it comes from, and how to know that it is the right one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pl_pipe.errors import ConfigError
from pl_pipe.units import format_bytes

from .report import Report

_CHUNK = 1 << 20
_LENGTHS = {"md5": 32, "sha256": 64}


@dataclass(frozen=True)
class Source:
    """One file; without a `url` it cannot be downloaded by a program, and `page` says where people get it."""

    file: str
    url: str | None = None
    page: str | None = None
    md5: str | None = None
    sha256: str | None = None
    sums_url: str | None = None
    """A list of md5 sums that the server keeps, for files that change."""
    size_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.file or Path(self.file).name != self.file or self.file in (".", ".."):
            raise ConfigError(f"prepare.sources: file={self.file!r} is no plain file name; give one without folders")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"prepare.sources: url={self.url} is neither http nor https; give one that is, or none")
        for algorithm, length in _LENGTHS.items():
            digest = getattr(self, algorithm)
            if digest is not None and (len(digest) != length or set(digest.lower()) - set("0123456789abcdef")):
                raise ConfigError(f"prepare.sources: {algorithm}={digest} of {self.file} has not {length} hex digits")

    @property
    def host(self) -> str:
        return urlsplit(self.url or "").hostname or ""

    @property
    def sum(self) -> tuple[str, str] | None:
        """The algorithm and the digest that the file must have, the stronger where there are two."""
        for algorithm in ("sha256", "md5"):
            digest = getattr(self, algorithm)
            if digest is not None:
                return algorithm, digest.lower()
        return None

    def by_hand(self, folder: Path) -> str:
        """What to fetch, and where to put it."""
        facts = [] if self.size_bytes is None else [format_bytes(self.size_bytes)]
        if self.sum is not None:
            facts.append(" ".join(self.sum))
        known = f" ({', '.join(facts)})" if facts else ""
        return f"  {self.url or self.page or self.file} -> {folder / self.file}{known}"


def digest_of(path: Path, algorithm: str, report: Report) -> str:
    """The file's digest, with a bar."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    with (
        path.open("rb") as file,
        report.bar(f"checking {path.name.removesuffix('.part')}", path.stat().st_size) as advance,
    ):
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            advance(len(chunk))
    return found.hexdigest()
