"""Lifelines among threads of one process, and signals that ranks at different batches serve together."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from pl_pipe.comm.lifelines import Fault, FaultKind, Lifelines
from pl_pipe.comm.meeting import connected
from pl_pipe.strategies.peer_faults import PeerFaults
from pl_pipe.strategies.pipeline.signals import AgreedSignals

LIMIT_S = 20.0


def meet(ranks: int) -> list[dict[int, socket.socket]]:
    """Every rank's connections."""
    barrier, contents = threading.Barrier(ranks), [None] * ranks
    found: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]

    def run(rank: int) -> None:
        def gather(content: Any) -> list[Any]:
            contents[rank] = content
            barrier.wait(LIMIT_S)
            return list(contents)

        found[rank] = connected(rank, gather, within_s=LIMIT_S)

    in_threads([lambda rank=rank: run(rank) for rank in range(ranks)])
    return found


def in_threads(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@contextmanager
def lifelines(ranks: int, *, silent_s: float = 60.0, **more: Any) -> Iterator[list[Lifelines]]:
    made = [Lifelines(rank, own, silent_s=silent_s, **more) for rank, own in enumerate(meet(ranks))]
    for one in made:
        one.start()
    try:
        yield made
    finally:
        for one in made:
            one.close()


def test_every_two_ranks_are_connected() -> None:
    assert [sorted(own) for own in meet(4)] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_strangers_are_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls a rank's port without knowing its token is sent away, and the rank still comes through."""
    plain = socket.socket.accept
    called: list[socket.socket] = []

    def accept(listener: socket.socket) -> Any:
        if not called:
            called.append(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))
            called[0].sendall(b'{"token": "guess", "rank": 1}\n')
        return plain(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    (zero, one) = meet(2)
    assert called
    zero[1].sendall(b"x")
    assert one[0].recv(1) == b"x"
    called[0].close()


def test_an_end_without_farewell_is_a_death_that_all_learn_of() -> None:
    with lifelines(3) as (zero, one, two):
        one.close(farewell=False)
        assert zero.wait_for_fault(LIMIT_S) == two.wait_for_fault(LIMIT_S) == Fault(1, FaultKind.GONE)


def test_an_end_with_farewell_is_none() -> None:
    heard: list[Any] = []
    with lifelines(3, on_note=lambda rank, note: heard.append(note)) as (zero, one, two):
        one.close()
        wait_until(lambda: zero.left() == two.left() == [1])
        zero.send("still here")
        wait_until(lambda: len(heard) == 2)  # rank 0's own, and rank 2's
        assert zero.first is two.first is None


def test_the_first_fault_counts_and_not_its_consequences() -> None:
    with lifelines(3) as (zero, one, two):
        two.tell(Fault(2, FaultKind.FAILED, "OSError: the disk is gone"))
        assert zero.wait_for_fault(LIMIT_S) == Fault(2, FaultKind.FAILED, "OSError: the disk is gone")
        two.close(farewell=False)
        one.close(farewell=False)
        wait_until(lambda: not zero._lines[1].open)
        assert zero.first is not None
        assert zero.first.rank == 2


def test_a_rank_without_beats_is_silent() -> None:
    (first, _), (zero, one) = lifelines_with_one_dumb()
    assert first.wait_for_fault(LIMIT_S) == Fault(1, FaultKind.SILENT)
    first.close()
    zero.close()
    one.close()


def lifelines_with_one_dumb() -> tuple[tuple[Lifelines, None], tuple[socket.socket, socket.socket]]:
    zero, one = socket.socketpair()
    made = Lifelines(0, {1: zero}, silent_s=1.0)
    made.start()
    return (made, None), (zero, one)


def test_what_a_rank_does_goes_with_its_beats() -> None:
    with lifelines(2, doing=lambda: {"at": "line 3"}) as (zero, _):
        wait_until(lambda: zero.last_seen()[1][1] == {"at": "line 3"})


def test_a_forked_child_does_not_keep_a_dead_parents_connections() -> None:
    """As the processes of a data loader would."""
    with lifelines(2) as (zero, one):
        child = os.fork()
        if not child:
            time.sleep(LIMIT_S)
            os._exit(0)
        try:
            one.close(farewell=False)
            assert zero.wait_for_fault(5) == Fault(1, FaultKind.GONE)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_a_watch_that_fails_is_its_ranks_fault_and_all_learn_of_it() -> None:
    """Otherwise nobody would notice the next death."""
    broken = threading.Event()

    def doing() -> Any:
        if broken.is_set() and threading.current_thread() is made[1]._thread:
            raise ValueError("no such frame")

    told: list[Fault] = []
    with lifelines(3, silent_s=2.0, doing=doing, on_fault=told.append) as made:
        broken.set()
        words = "the thread that watches the other ranks ended (ValueError: no such frame)"
        for one in made:
            assert one.wait_for_fault(LIMIT_S) == Fault(1, FaultKind.FAILED, words)
        wait_until(lambda: len(told) == 3)
        faults = PeerFaults(timeout_s=LIMIT_S)
        faults.lifelines = made[1]
        error = faults.explained(RuntimeError("Connection closed by peer"))
        assert str(error).startswith(f"rank 1 failed: {words}")


def test_what_is_no_message_ends_the_watch_loudly() -> None:
    zero, one = socket.socketpair()
    made = Lifelines(0, {1: zero}, silent_s=LIMIT_S)
    made.start()
    one.sendall(b"GET / HTTP/1.1\n")
    fault = made.wait_for_fault(LIMIT_S)
    assert fault is not None
    assert (fault.rank, fault.kind) == (0, FaultKind.FAILED)
    assert "JSONDecodeError" in fault.text
    made.close()
    assert zero.fileno() == -1
    one.close()


def test_a_note_does_not_wait_for_the_thread() -> None:
    """A signal's handler sends it, and the thread may stand still or not run yet."""
    zero, one = socket.socketpair()
    made = Lifelines(0, {1: zero}, silent_s=LIMIT_S)
    in_threads([lambda: [made.send("note") for _ in range(5000)]])
    made.close()
    one.close()


def test_connections_are_not_closed_under_a_thread_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn of the end all the same; the thread closes when it comes back."""
    monkeypatch.setattr("pl_pipe.comm.lifelines._JOIN_S", 0.1)
    goes_on, is_held = threading.Event(), threading.Event()

    def held(_rank: int, _note: Any) -> None:
        is_held.set()
        goes_on.wait(LIMIT_S)

    (own, others) = meet(2)
    zero = Lifelines(0, own, silent_s=LIMIT_S, on_note=held)
    one = Lifelines(1, others, silent_s=LIMIT_S)
    zero.start()
    one.start()
    zero.send("hold")
    assert is_held.wait(LIMIT_S)
    zero.close(farewell=False)
    assert own[1].fileno() != -1
    assert one.wait_for_fault(LIMIT_S) == Fault(0, FaultKind.GONE)
    goes_on.set()
    wait_until(lambda: own[1].fileno() == -1)
    assert zero.failure is None
    one.close()


@pytest.mark.parametrize("asking", [[0], [2], [0, 1, 2]])
def test_a_signal_is_served_before_the_same_batch_by_all(asking: list[int]) -> None:
    """The first stage is two batches ahead of the last one, which waits for it, and so on."""
    ahead = [0, 1, 2]
    served: dict[int, list[int]] = {rank: [] for rank in ahead}
    done = [0, 0, 0]
    changed = threading.Condition()
    with lifelines(3) as made:
        signals = []
        for rank, one in enumerate(made):
            note = lambda kind, rank=rank: served[rank].append(done[rank])  # noqa: E731
            signals.append(AgreedSignals(one, ranks=3, serve=note))
            one.on_note = signals[rank].hear

        def may_run(rank: int, batch: int) -> bool:
            """A stage needs the one before it for this batch, and the one after it for earlier ones."""
            fed = rank == 2 or done[rank + 1] > batch
            return fed and (rank == 0 or done[rank - 1] >= batch - ahead[rank])

        def train(rank: int) -> None:
            for batch in range(40):
                signals[rank].begin_batch(timeout_s=LIMIT_S)
                if batch == 10 + ahead[rank] and rank in asking:
                    signals[rank].ask("requeue")
                with changed:
                    changed.wait_for(partial(may_run, rank, batch), LIMIT_S)
                    done[rank] += 1
                    changed.notify_all()
                time.sleep(0.005)

        in_threads([lambda rank=rank: train(rank) for rank in range(3)])
    assert done == [40, 40, 40]
    assert served[0] == served[1] == served[2]
    assert len(served[0]) == 1
    assert 10 <= served[0][0] < 40


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
