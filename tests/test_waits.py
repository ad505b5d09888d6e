"""Waits for a rank that does not come: each ends in time, or when it is interrupted, and says whom it waited for."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipedream_farm import Farm, Order

from pl_pipe.comm import (
    CommunicationError,
    Direction,
    DistributedSumming,
    DistributedTransport,
    LocalSums,
    Message,
    ObjectChannel,
    Outbox,
    OutlineChannel,
    Wait,
    groups,
    read_as,
)
from pl_pipe.comm.interruption import interrupt_groups, is_about_peers
from pl_pipe.strategies.peer_faults import _standing
from pl_pipe.strategies.pipeline.agreed_stop import AgreedStop
from pl_pipe.tensors.ghosts import TensorSpec

pytest_plugins = "pipedream_plugin"

SHORT_S = 0.3
LONG_S = 30.0
ONE = TensorSpec.of(torch.empty(1))


# ---- what ranks wait for, rank 1 for rank 0


def message(timeout_s: float) -> Callable[[], Any]:
    transport = DistributedTransport(timeout_s=timeout_s)
    return lambda: transport.receive(Message(0, 1, 3, 0, Direction.FORWARD), ONE)


def receipt(timeout_s: float) -> Callable[[], Any]:
    transport = DistributedTransport(timeout_s=timeout_s)
    if dist.get_rank() == 1:
        transport.send(Message(1, 0, 3, 0, Direction.BACKWARD), torch.ones(1 << 20))
    return transport.flush


def report(timeout_s: float) -> Callable[[], Any]:
    channel = ObjectChannel(timeout_s=timeout_s)
    return lambda: channel.receive(0)


def outline(timeout_s: float) -> Callable[[], Any]:
    channel = OutlineChannel(0, [1], timeout_s=timeout_s)
    return lambda: channel.hear((0, 0))


def gradients(timeout_s: float) -> Callable[[], Any]:
    summing = DistributedSumming(dist.new_group([0, 1]), [0, 1], timeout_s=timeout_s)
    return lambda: summing.start(torch.ones(2)).wait()


def word(timeout_s: float) -> Callable[[], Any]:
    loop = SimpleNamespace(on_advance_end=None, epoch_loop=SimpleNamespace(on_advance_end=None))
    trainer: Any = SimpleNamespace(world_size=2, global_rank=dist.get_rank(), fit_loop=loop, callbacks=[])
    stop = AgreedStop(trainer, lag=0, timeout_s=timeout_s)
    if dist.get_rank() == 1:
        stop._post()
    return stop._read


def meeting(timeout_s: float) -> Callable[[], Any]:
    """Of the two ends of an NCCL pair, in its order of messages, over gloo."""
    group = dist.new_group([0, 1])
    return lambda: groups._meet(group, 1, 0, 1, torch.device("cpu"), timedelta(seconds=timeout_s))


WAITS: dict[str, tuple[Callable[[float], Callable[[], Any]], str]] = {
    "message": (message, "stage 1 waited for transfer 0 of batch 3 from stage 0 to stage 1 (float32[1])"),
    "receipt": (receipt, "rank 1 waited for rank 0 to take a message"),
    "report": (report, "rank 1 waited for what rank 0 reports of its step"),
    "outline": (outline, "rank 1, which loads no data, waited for a batch that rank 0 loads"),
    "gradients": (gradients, "rank 1 waited for the other ranks' gradients"),
    "word": (word, "rank 1 waited for rank 0's word after a batch, whether to stop"),
    "meeting": (meeting, "rank 1 waited for rank 0 to meet it before the first batch"),
}


def in_vain(me: Any) -> dict[str, Any]:
    """One wait after the other in the same two processes; first until the time is up, then until it is interrupted."""
    dist.init_process_group("gloo", rank=me.rank, world_size=2, timeout=timedelta(seconds=LONG_S))
    found: dict[str, list[str]] = {}
    for name, (prepare, _) in WAITS.items():
        wait = prepare(SHORT_S)
        found[name] = [words_of(wait) if me.rank == 1 else ""]
        dist.barrier()
    waits = {name: prepare(LONG_S) for name, (prepare, _) in WAITS.items()}
    dist.barrier()
    if me.rank == 1:
        threading.Timer(0.3, interrupt_groups).start()  # during the first; the others find their groups closed
        start_s = time.monotonic()
        for name, wait in waits.items():
            found[name].append(words_of(wait))
        assert time.monotonic() - start_s < LONG_S / 2
    (me.folder / f"over{me.rank}").touch()
    while not (me.folder / "over1").exists():  # rank 0 lives, and does not come
        time.sleep(0.05)
    return found


def words_of(wait: Callable[[], Any]) -> str:
    try:
        wait()
    except CommunicationError as error:
        return str(error) if is_about_peers(error) else f"taken for this rank's own: {error}"
    return "it came"


IN_VAIN = Order("test_waits.in_vain", ranks=2)


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("order", [pytest.param(IN_VAIN, id="2")])
def test_a_wait_ends_in_time_and_says_for_what_it_was(farm: Farm, order: Order, name: str) -> None:
    late, interrupted = farm.start(order).outcome[1][name]
    assert late.startswith(f"{WAITS[name][1]}, which did not come within 0.3 s; look at rank 0")
    assert interrupted.startswith(f"{WAITS[name][1]}, which cannot come: the connection is closed; look at rank 0")


def closes_untaken(me: Any) -> list[str]:
    """Rank 1 only sends, and rank 0 takes neither the message nor the notice of it; gives the threads that are left."""
    dist.init_process_group("gloo", rank=me.rank, world_size=2, timeout=timedelta(seconds=LONG_S))
    transport = DistributedTransport(timeout_s=LONG_S)
    if me.rank == 1:
        transport.send(Message(1, 0, 3, 0, Direction.BACKWARD), torch.ones(1 << 20))
        transport.close()
        (me.folder / "closed").touch()
    while not (me.folder / "closed").exists():  # rank 0 lives, and does not come
        time.sleep(0.05)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pl-pipe")]


@pytest.mark.parametrize("order", [pytest.param(Order("test_waits.closes_untaken", ranks=2), id="2")])
def test_a_transport_closes_though_nobody_takes_what_it_sent(farm: Farm, order: Order) -> None:
    assert farm.start(order).outcome == [[], []]


# ---- a rank that waits is not the one that holds up the others


class Work:
    """Notes where the process stands while it waits."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def wait(self, timeout: timedelta) -> None:
        self.seen.append(_standing())


def test_who_waits_for_rank_0s_word_is_seen_to_wait() -> None:
    stop, work = AgreedStop.__new__(AgreedStop), Work()
    stop._posted, stop._timeout_s = deque([(work, torch.ones(1))]), SHORT_S
    assert stop._read()
    assert work.seen[0]["waits"]


# ---- the small parts


def test_an_outbox_waits_in_the_order_in_which_messages_were_added() -> None:
    """The number of a gradient is that of an earlier batch than the activation before it has."""
    outbox, works = Outbox(timeout_s=SHORT_S), [Work() for _ in range(3)]
    for number, work in zip((4, 2, 5), works, strict=True):
        outbox.add(number, work, torch.ones(1), 0)
    outbox.settle(before=4)
    assert len(outbox) == 3, "what lies behind a younger one stays with it"
    outbox.settle(before=5)
    assert [len(work.seen) for work in works] == [1, 1, 0]
    outbox.settle()
    assert len(outbox) == 0


def test_sums_among_threads_are_kept_until_all_have_them() -> None:
    sums = LocalSums(2)
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    pending = [sums.replica(place).start(tensor) for place, tensor in enumerate(tensors)]
    pending[0].wait()
    pending[0].wait()
    assert len(sums) == 1
    pending[1].wait()
    assert [tensor.item() for tensor in tensors] == [3.0, 3.0]
    assert len(sums) == 0


# ---- interrupting while groups are given back


@contextmanager
def given_back(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Iterator[list[Any]]:
    """Two groups, the first of which the main thread gives back between being listed and being looked at."""
    first, second = object(), object()
    interrupted: list[Any] = []

    def backend(group: Any) -> str:
        if group is first:
            raise error
        return dist.Backend.GLOO

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={first: 0, second: 1}))
    monkeypatch.setattr(dist, "get_backend", backend)
    monkeypatch.setattr("pl_pipe.comm.interruption.interrupt_group", interrupted.append)
    yield interrupted
    assert interrupted == [second]


@pytest.mark.parametrize("error", [ValueError("Invalid process group specified"), KeyError("gone")])
def test_a_group_that_is_given_back_meanwhile_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with given_back(monkeypatch, error):
        interrupt_groups()


def test_an_error_of_ones_own_is_not_laid_at_a_peers_door() -> None:
    def wait() -> Wait:
        return Wait("rank 0", "a message", [1])

    for own in (RuntimeError("Invalid scalar type"), torch.OutOfMemoryError("no memory")):
        with pytest.raises(type(own)) as found, read_as(wait, timeout_s=1):
            raise own
        assert found.value is own
    closed = r"rank 0 waited for a message, which cannot come.*look at rank 1"
    with pytest.raises(CommunicationError, match=closed), read_as(wait, timeout_s=1):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
