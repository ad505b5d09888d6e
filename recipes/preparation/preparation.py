"""What every preparation does. sources -> *fetched or found, checked* -> built by the data set's own class -> noted."""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.errors import ConfigError, DataError

from .download import Patience, UnreachableError, download, fetch_text
from .hook import Hook
from .report import Report
from .source import Source
from .workplace import Workplace


class Preparation(ABC):
    """A data set that can be prepared; a subclass builds it from the files of its sources."""

    name: str
    """As the command and the data configuration call it."""
    trains: str
    """The recipe that is suggested when all is done."""

    def __init__(
        self,
        *,
        sources: Sequence[Mapping[str, Any]],
        mirror: str | None = None,
        offline: bool = False,
        verify: bool = True,
        timeout_s: float = 30.0,
        retries: int = 4,
        pause_s: float = 2.0,
    ) -> None:
        if timeout_s <= 0 or retries < 0 or pause_s < 0:
            raise ConfigError(
                f"prepare.timeout_s={timeout_s} must be positive, prepare.retries={retries} and "
                f"prepare.pause_s={pause_s} not negative"
            )
        self.sources = [self._source(given, mirror) for given in sources]
        self.offline, self.verify = offline, verify
        self.patience = Patience(timeout_s=timeout_s, retries=retries, pause_s=pause_s)

    def prepare(self, root: str | None, report: Report) -> None:
        """Leaves the data set in `root`; does nothing where an earlier call has."""
        if not root:
            raise ConfigError(
                f"data.root is not set; name the folder that is to hold the data: pl-pipe data prepare {self.name} "
                f"data.root=FOLDER"
            )
        with Workplace.opened(Path(root).expanduser().absolute()) as place:
            if place.record(self.name + self._settings_mark()) is not None:
                report.say(f"{self.name} is prepared in {place.root} already; nothing to do")
            else:
                for hook in self.hooks():
                    hook.find()  # what is not installed is better known before anything is fetched
                files = self._collected(place, report)
                made = self.build(place.root, files, report)
                names = sorted(str(path.relative_to(place.root)) for path in made)
                content = {"schema": 1, "made": names, "sources": [source.file for source in self.sources]}
                place.keep_record(self.name + self._settings_mark(), content)
                report.say(f"{self.name} is prepared in {place.root}: {_few(names)}")
            report.say(self.hint(place.root))

    def hooks(self) -> Sequence[Hook]:
        """The steps that other packages bring."""
        return ()

    @abstractmethod
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        """Makes the data set from the sources' files, by name; returns what must exist for it to be there."""

    def hint(self, root: Path) -> str:
        return f"Next: pl-pipe fit recipe={self.trains} data={self.name} data.root={root}"

    def settings(self) -> Mapping[str, Any]:
        """What changes the outcome: with other settings, it is prepared anew."""
        return {}

    def _settings_mark(self) -> str:
        files = [[source.file, source.md5, source.sha256] for source in self.sources]
        given = json.dumps([files, dict(self.settings())])
        return "_" + hashlib.sha256(given.encode()).hexdigest()[:8]

    def _collected(self, place: Workplace, report: Report) -> dict[str, Path]:
        """All files, those that were there first: a bad one is found before anything is fetched."""
        missing = [source for source in self.sources if not (place.root / source.file).is_file()]
        for source in self.sources:
            if source not in missing and self.verify:
                place.check(place.root / source.file, self._with_sum(source, report, found=True), report)
        by_hand = [source for source in missing if source.url is None or self.offline]
        if by_hand:
            why = "prepare.offline=true" if self.offline else "they need a registration or a licence"
            raise DataError(
                f"{self.name} needs files that are not fetched here ({why}){_to_fetch(missing, place.root)}"
            )
        for source in missing:
            try:
                download(self._with_sum(source, report), place.root, report, patience=self.patience, verify=self.verify)
            except UnreachableError as error:
                left = [other for other in missing if not (place.root / other.file).is_file()]
                raise DataError(f"{error}{_to_fetch(left, place.root)}") from error
        return {source.file: place.root / source.file for source in self.sources}

    def _with_sum(self, source: Source, report: Report, *, found: bool = False) -> Source:
        """The source with the sum that its server lists today; a file that is here may do without the server."""
        if source.sums_url is None or source.sum is not None or not self.verify or self.offline:
            return source
        try:
            listed = fetch_text(source.sums_url, patience=self.patience)
        except DataError as error:
            if not found:
                raise
            report.say(f"{source.file} stays unchecked: {error}")
            return source
        return dataclasses.replace(source, md5=listed_sum(listed, source))

    def _source(self, given: Mapping[str, Any], mirror: str | None) -> Source:
        source = Source(**given)
        if mirror is None or source.url is None:
            return source
        base = mirror.rstrip("/")
        lists = None if source.sums_url is None else f"{base}/{source.sums_url.rsplit('/', 1)[-1]}"
        return dataclasses.replace(source, url=f"{base}/{source.file}", sums_url=lists)


def listed_sum(text: str, source: Source) -> str:
    """The md5 of the source in lines of `sum  name`; a dated name may stand for the one called latest."""
    for line in text.splitlines():
        digest, _, name = line.partition(" ")
        parts = name.strip().lstrip("*").split("-")
        latest = "-".join("latest" if len(part) == 8 and part.isdigit() else part for part in parts)
        if source.file in ("-".join(parts), latest):
            return digest
    raise DataError(f"{source.sums_url} lists no sum for {source.file}; set prepare.verify=false to do without")


def _to_fetch(sources: Sequence[Source], root: Path) -> str:
    lines = "\n".join(source.by_hand(root) for source in sources)
    return f".\nFetch by hand, put it there, and run the same command again:\n{lines}"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
