"""What labs there are on this machine: a file each, for as long as they stand. lab -> *state* -> status, clean."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
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
_LOCKED_WITHIN_S = 60.0
_TRAFFIC = "traffic.py"
_BECOMES_WITHIN_S = 1.0
_REMEDY = "remove the file and what `ip netns list` shows of that lab"


@dataclass(frozen=True)
class Owner:
    """The process that a lab ends with. Its start time tells it from a later one with the same id."""

    pid: int
    started: float
    """In the kernel's ticks since the machine started: a time of day would change whenever the clock is set."""

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(os.getpid(), _started(os.getpid()))

    @property
    def alive(self) -> bool:
        try:
            return _started(self.pid) == self.started and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return False


def _started(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may have blanks and brackets
    return float(fields[19])


@dataclass(frozen=True)
class RunningFlow:
    """Traffic, and the processes that make it."""

    flow: Flow
    pids: tuple[int, ...]

    @property
    def runs(self) -> bool:
        """Whether all of its processes live; anybody may ask, root or not."""
        return all(_is_traffic(pid) for pid in self.pids)


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
            return _of_fields(fields, lab=path.stem)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LabError(f"{path} is damaged ({error!r}); {_REMEDY}") from error


def folder() -> Path:
    """Where the files are: one place for all users, since all of a machine's labs share its namespaces' names."""
    return Path(os.environ.get(FOLDER_VARIABLE, FOLDER))


def path_of(lab: str) -> Path:
    return folder() / f"{lab}.json"


def traffic_log(lab: str) -> Path:
    """What the processes that make a lab's traffic have to say."""
    return folder() / f"{lab}.traffic.log"


def write(state: LabState) -> None:
    """Writes the file anew, or for the first time; a reader never sees half of it."""
    path = path_of(state.lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state.as_json(), indent=1))
    part.replace(path)


def forget(lab: str) -> None:
    for path in (path_of(lab), path_of(lab).with_suffix(".part"), traffic_log(lab)):
        path.unlink(missing_ok=True)


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
def locked(give_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Keeps other commands from changing labs' files meanwhile; where one of them hangs, `give_up` goes on without."""
    folder().mkdir(parents=True, exist_ok=True)
    handle = os.open(folder(), os.O_RDONLY)
    deadline_s = time.monotonic() + _LOCKED_WITHIN_S
    try:
        while not _locks(handle) and not give_up():
            if time.monotonic() > deadline_s:
                raise LabError(
                    f"another command has been changing the labs in {folder()} for {_LOCKED_WITHIN_S:.0f} s; end it "
                    f"(fuser {folder()} shows which), and try again"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_traffic(pid: int) -> bool:
    """Whether the process makes traffic, and is not another that has its id now."""
    until = time.monotonic() + _BECOMES_WITHIN_S
    try:
        while not (words := psutil.Process(pid).cmdline()) and time.monotonic() < until:
            time.sleep(0.001)  # it has none while it becomes another program, as `ip netns exec` does
    except psutil.NoSuchProcess:
        return False
    return any(Path(word).name == _TRAFFIC for word in words)


# ---- a file that is damaged, or written by hand, may hold anything


def _of_fields(fields: Mapping[str, Any], *, lab: str) -> LabState:
    if fields["lab"] != lab:
        raise ValueError(f"it is of lab {fields['lab']!r}")
    owner = fields["owner"]
    return LabState(
        lab=lab,
        hosts=tuple(_text(host) for host in _list(fields["hosts"])),
        spectators=tuple(_text(host) for host in _list(fields["spectators"])),
        devices_per_host=_count(fields["devices_per_host"]),
        links={host: _link(link) for host, link in fields["links"].items()},
        inside=_link(fields["inside"]),
        owner=None if owner is None else Owner(_count(owner["pid"]), _number(owner["started"])),
        flows=tuple(_flow(entry) for entry in _list(fields["flows"])),
        since=_number(fields["since"]),
    )


def _link(content: Mapping[str, Any]) -> Link:
    rate = content["rate"]
    return Link(None if rate is None else _number(rate), _number(content["latency_s"]), _number(content["loss"]))


def _flow(content: Mapping[str, Any]) -> RunningFlow:
    flow = content["flow"]
    pids = tuple(_count(pid) for pid in _list(content["pids"]))
    return RunningFlow(Flow(_text(flow["source"]), _text(flow["target"]), _number(flow["rate"])), pids)


def _text(value: Any) -> str:
    return str(_of((str,), value))


def _count(value: Any) -> int:
    return int(_of((int,), value))


def _number(value: Any) -> float:
    return float(_of((int, float), value))


def _list(value: Any) -> list[Any]:
    return list(_of((list,), value))


def _of(kinds: tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no {kinds[-1].__name__}")
    return value
