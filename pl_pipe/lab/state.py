"""What labs there are on this machine: a file each, for as long as they stand. lab -> *state* -> status, clean."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from pl_pipe.cluster.rehearsed import Flow, Link
from pl_pipe.errors import LabError
from pl_pipe.json_file import check_schema, read_json
from pl_pipe.lab.layout import Layout
from pl_pipe.log import get_logger

log = get_logger(__name__)

SCHEMA = 1
FOLDER = "/run/pl-pipe/labs"
FOLDER_VARIABLE = "PL_PIPE_LAB_FOLDER"
_REMEDY = "remove the file and what `ip netns list` shows of that lab"


@dataclass(frozen=True)
class Owner:
    """The process that a lab ends with. Its start time tells it from a later one with the same id."""

    pid: int
    started: float

    @classmethod
    def this_process(cls) -> "Owner":
        me = psutil.Process()
        return cls(me.pid, me.create_time())

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class RunningFlow:
    """Traffic, and the processes that make it."""

    flow: Flow
    pids: tuple[int, ...]


@dataclass(frozen=True)
class LabState:
    """One lab, as any command of this machine may read it."""

    lab: str
    hosts: tuple[str, ...]
    """That train."""
    spectators: tuple[str, ...]
    devices_per_host: int
    links: Mapping[str, Link]
    inside: Link
    owner: Owner | None
    """None: it stands until `pl-pipe lab down`."""
    flows: tuple[RunningFlow, ...] = ()
    since: float = field(default_factory=time.time)

    @property
    def layout(self) -> Layout:
        return Layout(self.lab, (*self.hosts, *self.spectators))

    @property
    def abandoned(self) -> bool:
        return self.owner is not None and not self.owner.alive

    def with_link(self, host: str, link: Link) -> "LabState":
        return replace(self, links={**self.links, host: link})

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> "LabState":
        content = read_json(path, name=str(path), error=LabError, remedy=_REMEDY)
        fields = dict(check_schema(content, SCHEMA, source=str(path), what="lab", error=LabError, remedy=_REMEDY))
        del fields["schema"]
        try:
            fields["links"] = {host: Link(**link) for host, link in fields["links"].items()}
            fields["inside"] = Link(**fields["inside"])
            fields["owner"] = None if fields["owner"] is None else Owner(**fields["owner"])
            fields["flows"] = tuple(
                RunningFlow(Flow(**entry["flow"]), tuple(entry["pids"])) for entry in fields["flows"]
            )
            for name in ("hosts", "spectators"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise LabError(f"{path} is damaged ({error!r}); {_REMEDY}") from error


def folder() -> Path:
    """Where the files are: one place for all users, since all of a machine's labs share its namespaces' names."""
    return Path(os.environ.get(FOLDER_VARIABLE, FOLDER))


def path_of(lab: str) -> Path:
    return folder() / f"{lab}.json"


def write(state: LabState) -> None:
    """Writes the file anew, or for the first time; a reader never sees half of it."""
    path = path_of(state.lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state.as_json(), indent=1))
    part.replace(path)


def forget(lab: str) -> None:
    for suffix in (".json", ".part"):
        path_of(lab).with_suffix(suffix).unlink(missing_ok=True)


def labs() -> list[LabState]:
    """All labs of this machine, the oldest first; of a file that cannot be read the log has a word."""
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(LabState.read(path))
        except LabError as error:
            if path.exists():  # else its lab has just ended
                log.warning("%s", error)
    return sorted(found, key=lambda state: state.since)


def find(lab: str | None) -> LabState:
    """The lab of that name, or the only one that stands."""
    known = labs()
    chosen = [state for state in known if lab in (None, state.lab)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(state.lab for state in known) or "none"
    if lab is not None:
        raise LabError(f"there is no lab {lab} here; those that stand: {names}")
    if not known:
        raise LabError("no lab stands on this machine; start one with pl-pipe lab run or pl-pipe lab up")
    raise LabError(f"{len(known)} labs stand here ({names}); say which with --lab NAME")


@contextmanager
def locked() -> Iterator[None]:
    """Keeps other commands from changing labs' files meanwhile."""
    folder().mkdir(parents=True, exist_ok=True)
    handle = os.open(folder(), os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
