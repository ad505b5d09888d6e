"""Messages that are received ahead of their turn. Notices -> *Arrivals* -> DistributedTransport.

    noticed     8 7 9        from three senders, all behind one link
    received    7 ├ 8 ├ 9    one after another: the one that is needed first has the whole link

Asked for all at once, they would share the link and all be late. No more than a few batches wait here: in an evaluation
nothing else would keep a fast stage from sending all it has. What is wanted before its notice has come, or before its
turn, is received at once.
"""

import heapq
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pl_pipe.comm.followed import FollowedWork, end_threads
from pl_pipe.comm.transport import Direction, Message
from pl_pipe.tensors.ghosts import TensorSpec

_AHEAD = 4
"""Batches whose messages are under way or here, and not taken yet."""
_AT_ONCE_BYTES = 1 << 20
"""Up to so much is received side by side, so that the way there and back is not waited for with each small message."""


class Arrivals:
    """Receives that are under way or will be: by a thread after notices, or because this rank asks."""

    def __init__(self, post: Callable[[Message, TensorSpec], tuple[Any, Tensor]]) -> None:
        self._post = post
        self._posted: dict[Message, tuple[Any, Tensor]] = {}
        self._waiting: dict[Message, TensorSpec] = {}
        self._order: list[tuple[int, int, int, Message]] = []
        self._asked_first: dict[Message, bool] = {}
        """Messages whose notice has not come yet; whether they themselves have."""
        self._wanted: set[Message] = set()
        """Messages that were asked for and are on their way: nothing else is to share the link with them."""
        self._ahead: set[Message] = set()
        """Activations that the thread has posted and nobody has taken yet."""
        self._failed: dict[Message, Exception] = {}
        """Why the thread could not post a message: for whoever wants it, since nobody hears the thread."""
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None

    def noticed(self, message: Message, spec: TensorSpec) -> None:
        """The message is on its way; called by another thread than the others."""
        with self._changed:
            if message in self._asked_first:
                if not self._asked_first.pop(message):
                    self._wanted.add(message)
                return
            self._waiting[message] = spec
            heapq.heappush(self._order, (message.batch, message.source, message.number, message))
            if self._thread is None and self._open:
                self._thread = threading.Thread(target=self._fetch, name="pl-pipe-arrivals", daemon=True)
                self._thread.start()
            self._changed.notify()

    def ask(self, message: Message, spec: TensorSpec, *, has_notice: bool) -> None:
        """The message is wanted; `has_notice` if there is, or will be, a notice of it."""
        with self._changed:
            self._ask(message, spec, has_notice)

    def take(self, message: Message, spec: TensorSpec, *, has_notice: bool) -> tuple[Any, Tensor]:
        """What to wait for, and the tensor that then has come."""
        with self._changed:
            self._ask(message, spec, has_notice)
            self._ahead.discard(message)
            self._changed.notify()
            return self._posted.pop(message)

    def came(self, message: Message) -> None:
        """What was taken is here."""
        with self._changed:
            if message in self._asked_first:
                self._asked_first[message] = True
            self._wanted.discard(message)
            self._changed.notify()

    def close(self, interrupt: Callable[[], None]) -> None:
        """Lets go of everything; `interrupt` ends a wait that goes on."""
        with self._changed:
            self._open = False
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            end_threads([thread], interrupt)
        self._posted.clear()
        self._waiting.clear()
        self._failed.clear()

    def _ask(self, message: Message, spec: TensorSpec, has_notice: bool) -> None:
        if message in self._posted:
            return
        if message in self._failed:
            raise self._failed[message]
        noticed = self._waiting.pop(message, None) is not None
        self._posted[message] = self._post(message, spec)
        if noticed:
            self._wanted.add(message)
        elif has_notice:
            self._asked_first[message] = False

    def _fetch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._can_post() or not self._open)
                if not self._open:
                    return
                works = self._post_next()
            while works:
                works.pop(0).follow()

    def _can_post(self) -> bool:
        while self._order and self._order[0][-1] not in self._waiting:
            heapq.heappop(self._order)  # it was wanted before its turn
        return bool(self._order) and not self._wanted and self._has_room()

    def _has_room(self) -> bool:
        """For what is next. Gradients take no room: they are of batches that are in flight here."""
        if self._order[0][-1].direction is Direction.BACKWARD:
            return True
        return len({message.batch for message in self._ahead}) < _AHEAD

    def _post_next(self) -> list[FollowedWork]:
        works: list[FollowedWork] = []
        size_bytes = 0
        while self._can_post():
            message = self._order[0][-1]
            spec = self._waiting[message]
            size_bytes += spec.size_bytes
            if works and size_bytes > _AT_ONCE_BYTES:
                break
            heapq.heappop(self._order)
            del self._waiting[message]
            try:
                work, buffer = self._post(message, spec)
            except Exception as error:  # those that were posted before it come all the same
                self._failed[message] = error
                continue
            works.append(FollowedWork(work))
            self._posted[message] = works[-1], buffer
            if message.direction is Direction.FORWARD:
                self._ahead.add(message)
        return works
