"""Messages that are received ahead of their turn, which one when and by whom; and those that have left."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pl_pipe.comm import Direction, Message, notices
from pl_pipe.comm.arrivals import Arrivals
from pl_pipe.comm.notices import is_announced
from pl_pipe.comm.outbox import EmptyingOutbox
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.tensors.ghosts import TensorSpec

LARGE, SMALL = TensorSpec((1 << 20,), (1,), torch.float32, False), TensorSpec((1 << 14,), (1,), torch.float32, False)
SOON = timedelta(seconds=20)


def message(batch: int, *, source: int = 0, number: int = 0) -> Message:
    return Message(source, 1, batch, number, Direction.FORWARD)


class FakeWork:
    def __init__(self) -> None:
        self.came = threading.Event()
        self.error: Exception | None = None

    def wait(self, _: timedelta) -> None:
        assert self.came.wait(20)
        if self.error is not None:
            raise self.error


class Posts:
    """Receives that were asked for, and come when the test says so."""

    def __init__(self) -> None:
        self.works: dict[Message, FakeWork] = {}
        self.refused: dict[Message, Exception] = {}

    def __call__(self, message: Message, spec: TensorSpec) -> tuple[Any, Tensor]:
        if message in self.refused:
            raise self.refused[message]
        assert message not in self.works, "asked for twice: the second would wait for ever"
        self.works[message] = FakeWork()
        return self.works[message], torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    @property
    def batches(self) -> list[int]:
        return [message.batch for message in self.works]

    def come(self, message: Message) -> None:
        self.works[message].came.set()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def arrivals(posts: Posts) -> Iterator[Arrivals]:
    made = Arrivals(posts)
    yield made
    made.close(lambda: [work.came.set() for work in posts.works.values()] and None)
    assert not any(thread.name == "pl-pipe-arrivals" for thread in threading.enumerate())


def test_they_come_one_by_one_and_the_one_needed_first_first(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(5), LARGE)
    until(lambda: posts.batches == [5])
    for batch in (8, 7, 9):
        arrivals.noticed(message(batch, source=batch), LARGE)
    time.sleep(0.02)
    assert posts.batches == [5], "it has the link alone"
    for batch, posted in ((5, [5, 7]), (7, [5, 7, 8]), (8, [5, 7, 8, 9])):
        posts.come(message(batch, source=0 if batch == 5 else batch))
        until(lambda posted=posted: posts.batches == posted)  # type: ignore[misc]
    work, buffer = arrivals.take(message(5), LARGE, has_notice=True)
    work.wait(SOON)
    assert tuple(buffer.shape) == LARGE.shape


def test_small_ones_come_side_by_side(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(0), LARGE)
    until(lambda: posts.batches == [0])
    for number in range(20):
        arrivals.noticed(message(1, number=number), SMALL)
    posts.come(message(0))
    until(lambda: len(posts.works) == 1 + 16)
    time.sleep(0.02)
    assert len(posts.works) == 1 + 16, "a megabyte at once"


def test_what_is_wanted_now_does_not_wait_for_its_turn(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(0), LARGE)
    until(lambda: posts.batches == [0])
    arrivals.noticed(message(1), LARGE)
    arrivals.ask(message(1), LARGE, has_notice=True)
    assert posts.batches == [0, 1]
    arrivals.noticed(message(2), LARGE)
    posts.come(message(0))
    time.sleep(0.02)
    assert posts.batches == [0, 1], "nothing shares the link with it"
    posts.come(message(1))
    arrivals.take(message(1), LARGE, has_notice=True)[0].wait(SOON)
    arrivals.came(message(1))
    until(lambda: posts.batches == [0, 1, 2])


def test_no_more_than_a_few_batches_wait(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(0), SMALL)
    until(lambda: posts.batches == [0])  # the thread waits for it, and sees all the others at once
    for batch in range(1, 8):
        arrivals.noticed(message(batch), SMALL)
        arrivals.noticed(message(batch, number=1), SMALL)
    posts.come(message(0))
    until(lambda: posts.batches == [0, 1, 1, 2, 2, 3])
    time.sleep(0.02)
    assert posts.batches == [0, 1, 1, 2, 2, 3]
    for each in list(posts.works):
        posts.come(each)
    arrivals.take(message(0), SMALL, has_notice=True)[0].wait(SOON)
    until(lambda: posts.batches == [0, 1, 1, 2, 2, 3, 3, 4])
    time.sleep(0.02)
    assert posts.batches == [0, 1, 1, 2, 2, 3, 3, 4]


def test_gradients_of_batches_in_flight_come_before_inputs_of_later_ones(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(9), LARGE)
    until(lambda: posts.batches == [9])
    for batch in (10, 11, 12, 13):
        arrivals.noticed(message(batch), LARGE)
    gradient = Message(2, 1, 7, 0, Direction.BACKWARD)
    arrivals.noticed(gradient, LARGE)
    for came, posted in ((message(9), [9, 7]), (gradient, [9, 7, 10]), (message(10), [9, 7, 10, 11])):
        posts.come(came)
        until(lambda posted=posted: posts.batches == posted)  # type: ignore[misc]
    posts.come(message(11))
    until(lambda: posts.batches == [9, 7, 10, 11, 12])
    posts.come(message(12))
    late = gradient._replace(batch=8)
    arrivals.noticed(late, LARGE)
    until(lambda: posts.batches == [9, 7, 10, 11, 12, 8])
    posts.come(late)
    time.sleep(0.02)
    assert posts.batches == [9, 7, 10, 11, 12, 8], "four inputs wait"


@pytest.mark.parametrize("late", [False, True])
def test_a_notice_of_what_was_asked_for_starts_nothing(arrivals: Arrivals, posts: Posts, late: bool) -> None:
    arrivals.ask(message(3), LARGE, has_notice=True)
    if not late:
        arrivals.noticed(message(3), LARGE)
        arrivals.noticed(message(4), LARGE)
        time.sleep(0.02)
        assert posts.batches == [3], "nothing shares the link with it"
    posts.come(message(3))
    arrivals.take(message(3), LARGE, has_notice=True)[0].wait(SOON)
    arrivals.came(message(3))
    if late:
        arrivals.noticed(message(3), LARGE)
        arrivals.noticed(message(4), LARGE)
    until(lambda: posts.batches == [3, 4])
    assert not arrivals._asked_first


def test_a_message_without_a_notice_leaves_nothing_behind(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.take(message(3), SMALL, has_notice=False)
    assert not arrivals._asked_first
    assert not arrivals._posted


def test_an_error_is_for_who_takes_the_message(arrivals: Arrivals, posts: Posts) -> None:
    arrivals.noticed(message(0), LARGE)
    until(lambda: posts.batches == [0])
    posts.works[message(0)].error = RuntimeError("Connection closed by peer")
    posts.come(message(0))
    work, _ = arrivals.take(message(0), LARGE, has_notice=True)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait(SOON)


@pytest.mark.parametrize("error", [CommunicationError("closed"), MemoryError("none left")])
def test_a_receive_that_cannot_start_is_an_error_for_who_takes_it_alone(
    arrivals: Arrivals, posts: Posts, error: Exception
) -> None:
    """The others, those that were posted before it as well, come as ever."""
    arrivals.noticed(message(0), LARGE)
    until(lambda: posts.batches == [0])  # the thread waits for it, and sees all the others at once
    posts.refused[message(2)] = error
    for batch in (1, 2, 3):
        arrivals.noticed(message(batch), SMALL)
    posts.come(message(0))
    until(lambda: posts.batches == [0, 1, 3])
    posts.come(message(1))
    arrivals.take(message(1), SMALL, has_notice=True)[0].wait(SOON)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            arrivals.take(message(2), SMALL, has_notice=True)
    posts.come(message(3))
    arrivals.take(message(3), SMALL, has_notice=True)[0].wait(SOON)


@pytest.mark.parametrize(
    ("sent", "announced"),
    [
        pytest.param(LARGE, True, id="large"),
        pytest.param(SMALL._replace(shape=(2,)), False, id="small"),
        pytest.param(LARGE._replace(shape=(1,) * 10 + (1 << 20,)), False, id="too many dimensions"),
    ],
)
def test_who_gets_a_notice(sent: TensorSpec, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "WORTH_BYTES", 1 << 14)  # other tests lower it
    assert is_announced(sent) is announced


# ---- what has left


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pl_pipe.comm.outbox.dist.get_rank", lambda: 0)


@pytest.fixture
def outbox() -> Iterator[EmptyingOutbox]:
    made = EmptyingOutbox(timeout_s=20.0)
    yield made
    made.clear(lambda: None)
    assert not any(thread.name.startswith("pl-pipe-sends") for thread in threading.enumerate())


def test_a_message_is_let_go_of_when_it_has_left(outbox: EmptyingOutbox) -> None:
    works = [FakeWork() for _ in range(3)]
    storages = []
    for number, work in enumerate(works):
        buffer = torch.ones(4)
        storages.append(StorageWeakRef(buffer.untyped_storage()))
        outbox.add(number, work, buffer, target=number % 2)
    del buffer
    works[1].came.set()
    until(storages[1].expired)
    assert len(outbox) == 2, "receivers do not wait for each other"
    works[0].came.set()
    outbox.settle(before=2)
    until(storages[0].expired)
    assert len(outbox) == 1
    works[2].came.set()
    outbox.settle()
    until(storages[2].expired)


def test_a_message_that_cannot_leave_is_an_error_for_who_waits(outbox: EmptyingOutbox) -> None:
    lost, left = FakeWork(), FakeWork()
    lost.error = RuntimeError("Connection closed by peer")
    for number, work in enumerate((lost, left)):
        outbox.add(number, work, torch.ones(1), target=3)
        work.came.set()
    until(lambda: len(outbox) == 1)
    with pytest.raises(CommunicationError, match=r"rank 3 to take a message, which cannot come.*closed by peer"):
        outbox.settle()


def test_a_message_that_nobody_takes_is_waited_for_and_then_given_up() -> None:
    outbox, work = EmptyingOutbox(timeout_s=0.01), FakeWork()
    outbox.add(0, work, torch.ones(1), target=3)
    with pytest.raises(CommunicationError, match=r"rank 3 to take a message, which did not come within 0\.01 s"):
        outbox.settle()
    outbox.clear(work.came.set)
    assert len(outbox) == 0
