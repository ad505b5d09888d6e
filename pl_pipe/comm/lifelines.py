"""A thread that knows whether the other ranks live. process group -> *Lifelines* -> peer faults, agreed signals.

torch.distributed notices a dead peer only where it waits for just that one, and cannot say why it died. Here every two
ranks keep a connection of their own besides. The kernel closes a dead process's connections at once, so an end without
a farewell is a death; a rank that fails says so first, with its own error; one that stands still sends no more beats.

    rank 0 ══ beats, notes, faults, farewell ══ rank 1        lines of JSON over TCP, read and written by one thread
        ╚═══════════ rank 2 ═══════════════════════╝
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from pl_pipe.log import get_logger

log = get_logger(__name__)

_AT_ONCE = 1 << 16  # bytes
_JOIN_S = 5.0
_OFTEN = 20  # beats within the time after which a rank counts as silent, at most one a second


class FaultKind(Enum):
    GONE = "gone"
    """Its process ended without a word."""
    FAILED = "failed"
    """It met an error of its own, and said so."""
    SILENT = "silent"
    """Its process, or the network to it, stands still."""
    HELD = "held"
    """It lives, and others waited for it in vain."""


_ENDED = frozenset({FaultKind.GONE, FaultKind.FAILED})


@dataclass(frozen=True)
class Fault:
    """What is wrong with a rank, as the first one saw it that noticed."""

    rank: int
    kind: FaultKind
    text: str = ""
    """The error of a rank that failed; where a rank stood that others waited for."""
    point: str = ""
    """How far a rank had come that failed: equal for ranks that did so at the same point."""

    def as_note(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> "Fault":
        return cls(int(note["rank"]), FaultKind(note["kind"]), str(note["text"]), str(note["point"]))


@dataclass
class _Line:
    rank: int
    socket: socket.socket
    heard_s: float
    unread: bytes = b""
    unsent: bytes = b""
    doing: Any = None
    farewell: bool = False
    failed: bool = False
    open: bool = True

    @property
    def ends(self) -> bool:
        """As it has said itself, so that its end is no news."""
        return self.farewell or self.failed


@dataclass(eq=False)
class Lifelines:
    """This rank's connections to all others, by rank; made by `pl_pipe.comm.meeting.connected`."""

    rank: int
    connections: Mapping[int, socket.socket]
    silent_s: float
    """A rank without a beat for so long is taken for stopped."""
    doing: Callable[[], Any] = lambda: None
    """What this rank does just now: goes with every beat."""
    on_fault: Callable[[Fault], None] = lambda _: None
    """Called once, by the thread, with the first fault."""
    on_note: Callable[[int, Any], None] = lambda _rank, _note: None
    """Called by the thread with what another rank (or this one) sent by `send`."""
    tolerates: Callable[[Fault], bool] = lambda _: False
    """Asked, by the thread, whether the run goes on without a rank that is gone or failed."""
    first: Fault | None = field(init=False, default=None)
    """The first fault that this rank knows of: another one's, or its own if the watch itself failed."""
    failure: Exception | None = field(init=False, default=None)
    """What ended the thread before its time: nobody watches the other ranks then."""
    told: dict[int, Fault] = field(init=False, default_factory=dict)
    """The fault that each other rank has last spoken of, its own or another one's."""

    def __post_init__(self) -> None:
        now_s = time.monotonic()
        self._lines = {rank: _Line(rank, connection, now_s) for rank, connection in self.connections.items()}
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._closing = threading.Event()
        self._outbox: deque[Any] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)  # a signal's handler must not stand still because the thread does
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ, None)
        for line in self._lines.values():
            line.socket.setblocking(False)
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        _LIVING.add(self)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lifelines")

    def start(self) -> None:
        self._thread.start()

    def send(self, note: Any) -> None:
        """Tells every rank, this one too, by the thread. May be called in a signal's handler, so it takes no lock."""
        self._outbox.append(note)
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def tell(self, fault: Fault) -> None:
        """Tells the others of a fault: this rank's own, or one they may not have noticed."""
        self._tell_all({"fault": fault.as_note()})

    def report(self, fault: Fault) -> None:
        """Of a rank that this one, by other means, has found to be at fault."""
        self._note_fault(fault, tell=True)

    def wait_for_fault(self, seconds: float) -> Fault | None:
        self._known.wait(seconds)
        return self.first

    def forget_faults(self) -> None:
        """All ranks have met the same one, and go on together: the next one is the first."""
        self.first = None
        self._known.clear()
        self.told.clear()
        for line in self._lines.values():
            line.failed = False

    def left(self) -> list[int]:
        """Ranks that have ended, or are about to, and said so."""
        return [line.rank for line in self._lines.values() if line.ends]

    def last_seen(self) -> dict[int, tuple[float, Any]]:
        """How long ago each other rank gave a sign of life, and what it did then."""
        now_s = time.monotonic()
        return {rank: (now_s - line.heard_s, line.doing) for rank, line in self._lines.items() if not line.ends}

    def close(self, *, farewell: bool = True) -> None:
        """Ends the thread and the connections. Without a farewell, the others take this for a death."""
        if self._closing.is_set():
            return
        if farewell:
            self._tell_all({"farewell": True})
        self._closing.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"c")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._drop()
            return
        for line in self._lines.values():  # it is held up by what it called: the others learn now, and it closes later
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)

    # ---- the thread

    def _watch(self) -> None:
        try:
            self._look_after_the_others()
        except Exception as error:
            self.failure = error
            log.error("rank %d: the thread that watches the other ranks ended", self.rank, exc_info=error)
            words = f"the thread that watches the other ranks ended ({type(error).__name__}: {error})"
            self._note_fault(Fault(self.rank, FaultKind.FAILED, words), tell=True)
        if self._closing.is_set():
            self._drop()

    def _look_after_the_others(self) -> None:
        beat_s = min(1.0, self.silent_s / _OFTEN)
        next_s = last_s = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(beat_s / 2):
                if key.data is None:
                    self._woken.recv(_AT_ONCE)
                else:
                    self._read(key.data)
            while self._outbox:
                note = self._outbox.popleft()
                self._tell_all({"note": note})
                self.on_note(self.rank, note)
            now_s = time.monotonic()
            if now_s - last_s > self.silent_s / 2:  # it was this process that stood still
                for line in self._lines.values():
                    line.heard_s = now_s
            last_s = now_s
            if now_s >= next_s:
                self._tell_all({"beat": self.doing()})
                next_s = now_s + beat_s
            else:
                self._tell_all(None)
            for line in self._lines.values():
                if line.open and now_s - line.heard_s > self.silent_s:
                    self._note_fault(Fault(line.rank, FaultKind.SILENT), tell=True)

    def _read(self, line: _Line) -> None:
        try:
            chunk = line.socket.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        *messages, line.unread = (line.unread + chunk).split(b"\n")
        for message in messages:
            self._take(line, json.loads(message))
        if not chunk:
            self._selector.unregister(line.socket)
            line.open = False
            if not line.ends:
                self._note_fault(Fault(line.rank, FaultKind.GONE), tell=True)

    def _take(self, line: _Line, message: Mapping[str, Any]) -> None:
        line.heard_s = time.monotonic()
        if "beat" in message:
            line.doing = message["beat"]
        if "farewell" in message:
            line.farewell = True
        if "note" in message:
            self.on_note(line.rank, message["note"])
        if "fault" in message:
            fault = Fault.of_note(message["fault"])
            self.told[line.rank] = fault
            line.failed = line.failed or fault.rank == line.rank
            self._note_fault(fault, tell=False)

    def _note_fault(self, fault: Fault, *, tell: bool) -> None:
        if self.first is not None or self._closing.is_set():
            return
        if fault.rank != self.rank and fault.kind in _ENDED and self.tolerates(fault):
            return
        self.first = fault
        if tell:
            self.tell(fault)
        self._known.set()
        self.on_fault(fault)

    def _tell_all(self, message: Mapping[str, Any] | None) -> None:
        """Never waits: what a connection does not take now goes with the next message."""
        content = b"" if message is None else json.dumps(message).encode() + b"\n"
        with self._lock:
            for line in self._lines.values():
                if not line.open:
                    continue
                line.unsent += content
                with contextlib.suppress(OSError):  # a connection that broke is found out by reading it
                    while line.unsent:
                        line.unsent = line.unsent[line.socket.send(line.unsent) :]

    def _drop(self) -> None:
        """Lets the connections go, without a word."""
        for line in self._lines.values():
            line.socket.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        _LIVING.discard(self)


_LIVING: "weakref.WeakSet[Lifelines]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A data loader's worker would keep its dead parent's connections open."""
    for lifelines in list(_LIVING):
        for line in lifelines._lines.values():
            line.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
