"""A data folder while it is prepared: one at a time, and with a memory of what was checked and made."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pl_pipe.errors import DataError

from .report import Report
from .source import Source, digest_of

NOTES = ".pl-pipe"


class Workplace:
    """`data.root`, with notes in a hidden folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.notes = root, root / NOTES

    @classmethod
    @contextmanager
    def opened(cls, root: Path) -> Iterator["Workplace"]:
        """Makes the folder if need be; a second command in it is refused while the first one works."""
        if root.exists() and not root.is_dir():
            raise DataError(f"data.root={root} is not a folder; set data.root to the folder that is to hold the data")
        place = cls(root)
        place.notes.mkdir(parents=True, exist_ok=True)
        with (place.notes / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DataError(f"another pl-pipe data prepare works in {root}; wait until it has ended") from error
            yield place

    def record(self, name: str) -> dict[str, Any] | None:
        """What an earlier call has made, if all of it is still there."""
        found = self._read(f"{name}.json")
        if found is None or not all((self.root / made).exists() for made in found.get("made", [""])):
            return None
        return found

    def keep_record(self, name: str, content: dict[str, Any]) -> None:
        self._write(f"{name}.json", content)

    def check(self, path: Path, source: Source, report: Report) -> None:
        """Refuses a file that has not the published sum; one that was checked before is not read again."""
        size = path.stat().st_size
        if source.size_bytes not in (None, size):
            raise DataError(
                f"{path} has {size} bytes, expected {source.size_bytes}; it is cut short or another file, and was left "
                f"alone: fetch it anew, or set prepare.verify=false to take it as it is"
            )
        if source.sum is None:
            report.say(f"{source.file}: no sum is published, so it is taken as it is")
            return
        algorithm, expected = source.sum
        stat = path.stat()
        fact = [algorithm, stat.st_size, stat.st_mtime_ns]
        checked = self._read("checked.json") or {}
        if checked.get(source.file, [])[:3] == fact:
            found = checked[source.file][3]
        else:
            found = digest_of(path, algorithm, report)
            self._write("checked.json", {**checked, source.file: [*fact, found]})
        if found != expected:
            raise DataError(
                f"{path} has {algorithm} {found}, expected {expected}; it is damaged or another file, and was left "
                f"alone: fetch it anew, or set prepare.verify=false to take it as it is"
            )

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads((self.notes / name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        part = self.notes / f"{name}.part"
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(self.notes / name)
