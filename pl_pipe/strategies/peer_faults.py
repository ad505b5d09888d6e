"""One error for all ranks when one of them ends or stands still. lifelines -> *PeerFaults* -> launcher, trainer.

A rank that dies takes the others with it, in whatever order their waits break. Each of them ends with the same error,
which names the rank that was first, its stage and its own words.

    a rank is gone ─► lifelines ─► grace, for the main thread may notice by itself
                                └► waits in gloo are interrupted ─► main thread: PeerError
                                └► still no sign of the main thread: message to stderr, end of the process
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from pl_pipe.comm.interruption import interrupt_groups, is_about_peers, ran_out_of_time
from pl_pipe.comm.lifelines import Fault, FaultKind, Lifelines
from pl_pipe.comm.meeting import Gather, connected
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.errors import StageError
from pl_pipe.log import get_logger
from pl_pipe.partition import Plan

log = get_logger(__name__)

START_S = 300.0
"""For all ranks to come to the process group, if `timeout_s` is less."""
_MEETING_S = 30.0
_NEWS_S = 3.0  # between a broken connection and the news of why it broke
_GRACE_S = {FaultKind.GONE: 0.5, FaultKind.SILENT: 0.0, FaultKind.FAILED: 3.0, FaultKind.HELD: 0.5}
_SAME_S = 10.0  # for ranks that are still computing to come to an error that another one has met
_LAST_S = 30.0  # for the main thread to come to the next wait, or to finish writing a checkpoint
_LOOK_S = 0.02
_LOOKED_AT = 12  # innermost frames of a stack
_broken: list[tuple[Any, str]] = []
"""The process group of a run that this rank has left alone, and why."""


class PeerError(CommunicationError):
    """Another rank is gone, failed, or stands still."""


class PeerFaults:
    """Watches the other ranks during a trainer's run; with one rank it does nothing."""

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.lifelines: Lifelines | None = None
        self.on_note: Callable[[int, Any], None] = _do_nothing
        """Hears what ranks tell each other over the lifelines."""
        self.tolerates: Callable[[Fault], bool] = _never
        """Asked whether the run goes on without a rank that is gone or failed."""
        self.on_interrupt: Callable[[str], None] = _do_nothing
        """Told why, when waits are interrupted: of waits that are not torch.distributed's."""
        self.progress: Callable[[], int] = int
        """Counts what the main thread has done, for those who wait for it."""
        self.before_exit: Callable[[], None] = _do_nothing
        """Called before the process is ended from outside its main thread."""
        self.has_begun = self.has_ended = False
        """The ranks have met; and this one has parted from them, for good or ill."""
        self._places: dict[int, str] = {}
        self._suspected: dict[int, int] = {}
        """What ranks had done when others last complained of them."""
        self._noticed = threading.Event()
        self._verdict: bool | None = None
        """Rank 0's, whether all ranks have met the same error."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy, of a trainer as well, has not begun a run."""
        fresh = vars(PeerFaults(timeout_s=self.timeout_s))
        return {**fresh, "_noticed": None, "before_exit": self.before_exit}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update({**state, "_noticed": threading.Event()})

    @property
    def patience_s(self) -> float:
        """How long the main thread may take to notice a fault."""
        return min(_LAST_S, self.timeout_s)

    def begin(self, rank: int | None = None, gather: Gather | None = None) -> None:
        """At the same point on all ranks, once they have a process group; with several, `rank` among all of them, and
        what gathers from all."""
        self.end()
        if dist.get_world_size() == 1:
            return
        timeout, default = timedelta(seconds=self.timeout_s), dist.group.WORLD
        dist.distributed_c10d._set_pg_timeout(timeout, default)
        self._noticed = threading.Event()
        rank = dist.get_rank() if rank is None else rank
        connections = connected(rank, gather or _gathered, within_s=min(_MEETING_S, self.timeout_s))
        self.lifelines = Lifelines(
            rank,
            connections,
            silent_s=self.timeout_s,
            doing=self._doing,
            on_fault=self._interrupt,
            on_note=self._hear,
            tolerates=lambda fault: self.tolerates(fault),
        )
        self.lifelines.start()
        self._suspected, self._verdict = {}, None
        self.has_begun, self.has_ended = True, False

    def know_stages(self, plan: Plan | None) -> None:
        """For the messages."""
        stages = [] if plan is None else plan.stages
        self.know_places({rank: f"stage {number}" for number, stage in enumerate(stages) for rank in stage.ranks})

    def know_places(self, places: Mapping[int, str]) -> None:
        """What ranks are, in words."""
        self._places = dict(places)

    def end(self) -> None:
        """This rank needs the others no more, or has said what is wrong with it."""
        self._noticed.set()
        self.on_note = _do_nothing
        if self.lifelines is not None:
            self.has_ended = True
            self.lifelines.close()
            self.lifelines = None

    def _doing(self) -> dict[str, Any]:
        return {**_standing(), "done": self.progress()}

    def suspect(self, ranks: Sequence[int]) -> None:
        """By any thread that knows others to wait for these ranks. One suspected twice without progress is at fault."""
        lifelines = self.lifelines
        if lifelines is None:
            return
        seen = {lifelines.rank: self._doing(), **{rank: doing for rank, (_, doing) in lifelines.last_seen().items()}}
        known = {rank: seen[rank] for rank in ranks if seen.get(rank) is not None}
        before, self._suspected = self._suspected, {rank: doing["done"] for rank, doing in known.items()}
        for rank, doing in known.items():
            if before.get(rank) == doing["done"]:
                lifelines.report(Fault(rank, FaultKind.HELD, doing["at"]))
                return

    def explained(self, error: BaseException) -> BaseException:
        """What to raise for an error of the main thread: itself, or that of the rank it came of. The others learn."""
        self._noticed.set()
        lifelines = self.lifelines
        if lifelines is None:
            return error
        _broken[:] = [(dist.group.WORLD, _words(error))]
        if not (isinstance(error, PeerError) or is_about_peers(error)):
            self.tell_own(error)
            return error
        late = ran_out_of_time(error)
        fault = lifelines.first if late else lifelines.wait_for_fault(_NEWS_S)
        if fault is None and late:
            fault = self._who_holds_up(lifelines)
        if fault is None:
            self.tell_own(error)
            return self._nobody_to_blame(lifelines, error, late=late)
        if fault.rank == lifelines.rank and lifelines.failure is None:
            return error
        lifelines.tell(fault)
        return PeerError(self.message(fault))

    def is_everybodys(self, error: BaseException, *, point: str) -> bool:
        """Whether every rank has met this error, in the same words at the same point; all have the same answer.

        Then the ranks are still connected, and watch each other as before. Others may take their time to come to the
        error; one that meets another one, or waits for this rank, says no.
        """
        lifelines = self.lifelines
        if lifelines is None or isinstance(error, PeerError) or is_about_peers(error):
            return False
        self._noticed.set()
        own = Fault(lifelines.rank, FaultKind.FAILED, _words(error), point)
        lifelines.tell(own)
        others = [rank for rank in range(dist.get_world_size()) if rank != own.rank]

        def all_alike() -> bool | None:
            first, left = lifelines.first, lifelines.left()
            if first is not None and first.kind is not FaultKind.FAILED:
                return False
            known = {rank: lifelines.told.get(rank) for rank in others}
            for rank, fault in known.items():
                if rank in left if fault is None else fault != replace(own, rank=rank):
                    return False
            return None if None in known.values() else True

        within_s = min(_SAME_S + _NEWS_S, self.timeout_s)
        if own.rank == 0:
            lifelines.send({"all_alike": _answer(all_alike, within_s=within_s) is True})

        def verdict() -> bool | None:
            return False if all_alike() is False else self._verdict

        together, self._verdict = _answer(verdict, within_s=within_s + _NEWS_S), None
        if not together:
            return False
        _answer(all_alike, within_s=_NEWS_S)  # what rank 0 has heard, this rank will too, and must not take for news
        lifelines.forget_faults()
        self._noticed = threading.Event()
        return True

    def _hear(self, sender: int, note: Any) -> None:
        if isinstance(note, dict) and "all_alike" in note:
            self._verdict = bool(note["all_alike"])
        else:
            self.on_note(sender, note)

    def tell_own(self, error: BaseException) -> None:
        """This rank ends too, of whatever cause."""
        if self.lifelines is not None:
            self.lifelines.tell(Fault(self.lifelines.rank, FaultKind.FAILED, _words(error)))

    def message(self, fault: Fault) -> str:
        name, later = self._name(fault.rank), "then continue from the last checkpoint"
        if fault.kind is FaultKind.GONE:
            return (
                f"{name} is gone: its process ended without a word, as one does that is killed (by hand, or by the "
                f"system for want of memory); look at its output and the system's log, {later}"
            )
        if fault.kind is FaultKind.FAILED:
            return f"{name} failed: {fault.text}; mend that (its own output tells more), {later}"
        if fault.kind is FaultKind.SILENT:
            return (
                f"{name} has given no sign of life for {self.timeout_s:g} s: its process is stopped, or the network to "
                f"its host is; look at both, or raise timeout_s, {later}"
            )
        return (
            f"{name} has held up the others for {self.timeout_s:g} s, standing at {fault.text}; see what it does "
            f"there, or raise timeout_s, {later}"
        )

    def _name(self, rank: int) -> str:
        place = self._places.get(rank)
        return f"rank {rank}" if place is None else f"rank {rank} ({place})"

    def _who_holds_up(self, lifelines: Lifelines) -> Fault | None:
        """The rank without a beat, or else one that does not wait for others itself."""
        seen = lifelines.last_seen()
        silent = [rank for rank, (ago_s, _) in seen.items() if ago_s > self.timeout_s / 2]
        if silent:
            return Fault(silent[0], FaultKind.SILENT)
        for rank, (_, doing) in seen.items():
            if doing is not None and not doing["waits"]:
                return Fault(rank, FaultKind.HELD, doing["at"])
        return None

    def _nobody_to_blame(self, lifelines: Lifelines, error: BaseException, *, late: bool) -> BaseException:
        left = ", ".join(self._name(rank) for rank in lifelines.left())
        if left:
            return PeerError(
                f"{left} ended in good order while this rank still waited: {_words(error)}; see that all ranks have "
                f"the same data and take the same number of batches"
            )
        if not late:
            return error
        places = [f"{self._name(rank)} at {doing['at']}" for rank, (_, doing) in lifelines.last_seen().items() if doing]
        return PeerError(
            f"all ranks have waited for each other for {self.timeout_s:g} s ({', '.join(places)}; here: "
            f"{_words(error)}); see that all ranks have the same data and take the same number of batches"
        )

    # ---- in threads of their own

    def _interrupt(self, fault: Fault) -> None:
        threading.Thread(target=self._see_to_the_end, args=(fault, self._noticed), daemon=True).start()

    def _see_to_the_end(self, fault: Fault, noticed: threading.Event) -> None:
        if noticed.wait(_GRACE_S[fault.kind]) or (fault.kind is FaultKind.FAILED and _comes_to_it(noticed)):
            return
        self.on_interrupt(self.message(fault))
        interrupt_groups()
        if noticed.wait(self.patience_s):
            return
        text = f"this rank ({_own_rank(self.lifelines)}) ends, since {self.message(fault)}"
        sys.stderr.write(f"PeerError: {text}\n")
        sys.stderr.flush()
        self.before_exit()
        os._exit(1)


def _do_nothing(*_: Any) -> None: ...


def _never(_: Fault) -> bool:
    return False


def refuse_broken_connections() -> None:
    """After a run that this rank has left with an error of its own, or of another rank: others may be gone."""
    for group, words in _broken:
        if dist.is_initialized() and dist.group.WORLD is group:
            raise StageError(
                f"an earlier run of this script ended on rank {dist.get_rank()} with {words}, and the ranks are no "
                f"longer connected; start the script again from its last checkpoint, or go on with one device"
            )


def _comes_to_it(noticed: threading.Event) -> bool:
    """Whether the main thread, while it computes and waits for nobody, meets an error of its own."""
    deadline_s = time.monotonic() + _SAME_S
    while not _standing()["waits"] and time.monotonic() < deadline_s:
        if noticed.wait(_LOOK_S):
            return True
    return noticed.is_set()


def _answer(ask: Callable[[], bool | None], *, within_s: float) -> bool | None:
    """What it says, once it says something in time."""
    deadline_s = time.monotonic() + within_s
    while (answer := ask()) is None and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return answer


def _own_rank(lifelines: Lifelines | None) -> int:
    return dist.get_rank() if lifelines is None else lifelines.rank


def _gathered(content: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, content)
    return everyone


def _words(error: BaseException) -> str:
    """An error on one line, short enough for a message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _standing() -> dict[str, Any]:
    """Where the main thread is: its innermost line outside torch, and whether it waits for other ranks there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    waits, place = False, None
    for _ in range(_LOOKED_AT):
        if frame is None:
            break
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if "torch/distributed/" in file or "pl_pipe/comm/" in file:
            waits = True
        elif place is None and "/torch/" not in file:
            place = f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return {"waits": waits, "at": place or "an unknown line"}
