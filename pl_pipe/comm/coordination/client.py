"""A worker's way to the coordinator. synchronizer, strategy -> *CoordinatorClient* -> store -> coordinator."""

import pickle
import time
from typing import Any

from pl_pipe.comm.coordination.mailbox import Mailbox
from pl_pipe.comm.coordination.messages import REQUESTS, divided, group_of_json, packed, replies, unpacked
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.comm.waiting import Wait, read_as
from pl_pipe.grouping import Group

_FIRST = 0  # the rank that decides


class CoordinatorClient:
    """For one thread; a request waits for its answer before the next is made."""

    def __init__(self, mailbox: Mailbox, worker: int, *, among: str = "all", timeout_s: float = 300.0) -> None:
        """
        Args:
            among: the name of the set that the worker belongs to.
            timeout_s: what is said in messages; that the time is up, others find out.
        """
        self.worker = worker
        self.waited_s = 0.0
        """In all, for answers."""
        self._mailbox, self._among, self._timeout_s = mailbox, among, timeout_s

    def group(self, steps: int = 1) -> Group:
        """This worker has taken so many steps since the last group; waits until it is in one."""
        return group_of_json(self._asked("arrive", steps=steps)[0]["group"])

    def tick(self) -> int:
        """This worker has handed in a wave; waits while it is too far ahead. Returns how far ahead it is now."""
        return int(self._asked("tick")[0]["ahead"])

    def meet(self, content: Any = None, about: str = "a meeting") -> dict[int, Any]:
        """Waits until all living workers have come; what each has brought, by worker.

        All come to the same meetings in the same order, as to the collectives of torch.distributed; what they bring is
        pickled as there. A worker that dies on the way is absent. Workers that have come `about` different things are
        told so: what they brought does not belong together.
        """
        head, body = self._asked("meet", pickle.dumps(content), about=about)
        parts = divided(head["lengths"], body)
        return {worker: pickle.loads(part) for worker, part in zip(head["members"], parts, strict=True)}

    def leave(self) -> None:
        """No more steps for now: nobody waits for this worker's. It still comes to meetings."""
        self._put("leave")

    def join(self) -> None:
        self._put("join")

    def reunited(self) -> None:
        """To be said by one worker, when all have averaged everything."""
        self._put("reunited")

    def _asked(self, kind: str, body: bytes = b"", **more: str | int) -> tuple[dict[str, Any], bytes]:
        start_s = time.perf_counter()
        self._put(kind, body, **more)
        with read_as(self._wait, timeout_s=self._timeout_s):
            head, answer = unpacked(self._mailbox.take(replies(self.worker)))
        self.waited_s += time.perf_counter() - start_s
        if "error" in head:
            raise CommunicationError(str(head["error"]))
        return head, answer

    def _put(self, kind: str, body: bytes = b"", **more: str | int) -> None:
        head = {"kind": kind, "set": self._among, "worker": self.worker, **more}
        with read_as(self._wait, timeout_s=self._timeout_s):
            self._mailbox.put(REQUESTS, packed(head, body))

    def _wait(self) -> Wait:
        return Wait(f"rank {self.worker}", f"the coordinator on rank {_FIRST}", [_FIRST])
