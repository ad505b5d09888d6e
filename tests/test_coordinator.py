"""The coordinator and its clients: over a real store, with workers as threads."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from pl_pipe.comm import CommunicationError
from pl_pipe.comm.coordination import Coordinator, CoordinatorClient, LocalMailbox, Mailbox, StoreMailbox
from pl_pipe.grouping import Group, GroupRules

LIMIT_S = 30.0


@pytest.fixture(params=["store", "local"])
def mailbox(request: pytest.FixtureRequest) -> Iterator[Mailbox]:
    if request.param == "local":
        yield LocalMailbox()
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield StoreMailbox("run0", store)


class Run:
    """Workers as threads."""

    def __init__(self, mailbox: Mailbox, workers: int, **settings: Any) -> None:
        self.coordinator = Coordinator(mailbox, {"all": range(workers)}, **settings)
        self.coordinator.start()
        self.clients = [CoordinatorClient(mailbox.another(), worker) for worker in range(workers)]
        self.found: dict[int, Any] = {}

    def work(self, *jobs: Callable[[CoordinatorClient], Any]) -> list[Any]:
        """One job a worker, side by side."""

        def run(worker: int) -> None:
            try:
                self.found[worker] = jobs[worker](self.clients[worker])
            except CommunicationError as error:
                self.found[worker] = error

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
        return [self.found[worker] for worker in range(len(jobs))]


def steps(count: int, seed: int) -> Callable[[CoordinatorClient], list[Group]]:
    def work(client: CoordinatorClient) -> list[Group]:
        draw, groups = random.Random(seed), []
        for _ in range(count):
            time.sleep(draw.uniform(0.0, 0.002))
            groups.append(client.group())
        client.leave()
        return groups

    return work


def test_every_request_is_answered_by_a_group_with_its_worker(mailbox: Mailbox) -> None:
    run = Run(mailbox, 5, rules=GroupRules(connect_every=2))
    counts = [30, 17, 25, 4, 30]
    answers = run.work(*(steps(count, worker) for worker, count in enumerate(counts)))
    seen: Counter[int] = Counter()
    named = {group.number: group for groups in answers for group in groups}
    for worker, groups in enumerate(answers):
        assert len(groups) == counts[worker]
        assert all(worker in group.members for group in groups)
        assert [group.number for group in groups] == sorted({group.number for group in groups})
        seen.update(group.number for group in groups)
    assert all(seen[number] == len(group.members) for number, group in named.items())
    assert run.coordinator.groups.count == len(named)
    assert [(group.number, group.members) for group in run.coordinator.groups.kept] == sorted(
        (number, group.members) for number, group in named.items()
    )
    run.coordinator.close()


def test_a_meeting_ends_when_all_who_live_have_come(mailbox: Mailbox) -> None:
    run = Run(mailbox, 3)
    for number in range(3):
        found = run.work(*(lambda client, number=number: client.meet((client.worker, number)) for _ in range(3)))
        assert found == [{worker: (worker, number) for worker in range(3)}] * 3
    threading.Timer(0.1, run.coordinator.lost, args=(2,)).start()
    assert run.work(*(lambda client: sorted(client.meet()) for _ in range(2))) == [[0, 1]] * 2
    run.coordinator.close()


def test_workers_at_different_points_are_told_so(mailbox: Mailbox) -> None:
    """What one brings to a reduction is no answer to another's vote."""
    run = Run(mailbox, 3)
    found = run.work(
        lambda client: client.meet(1.5, "reduce a value"),
        lambda client: client.meet(2.5, "reduce a value"),
        lambda client: client.meet(True, "vote"),
    )
    for error in found:
        assert isinstance(error, CommunicationError)
        assert "rank 0 has come to reduce a value and rank 2 to vote; see that hooks" in str(error)
    run.coordinator.close()


def test_a_lost_worker_holds_up_nobody(mailbox: Mailbox) -> None:
    """The others are in a group that waits for it without a deadline."""
    run = Run(mailbox, 3, rules=GroupRules(connect_every=1, longest_wait_s=0.01))
    threading.Timer(0.2, run.coordinator.lost, args=(2,)).start()

    def work(client: CoordinatorClient) -> list[Group]:
        groups = [client.group() for _ in range(5)]
        client.leave()
        return groups

    for groups in run.work(work, work):
        assert all(set(group.members) <= {0, 1} for group in groups)
    run.coordinator.close()


def test_waves_wait_for_the_slowest(mailbox: Mailbox) -> None:
    run = Run(mailbox, 3, distance=1)

    def waves(client: CoordinatorClient) -> list[int]:
        found = []
        for _ in range(8):
            time.sleep(0.01 if client.worker == 1 else 0.0)
            found.append(client.tick())
        client.leave()
        return found

    for ahead in run.work(waves, waves, waves):
        assert max(ahead) <= 1
    assert run.coordinator.widest == 1
    run.coordinator.close()


def test_those_for_whom_others_wait_are_named(mailbox: Mailbox) -> None:
    named: list[list[int]] = []

    def complain(workers: list[int]) -> None:
        named.append(workers)
        if len(named) == 2:
            run.coordinator.fail("worker 1 stands still")

    run = Run(mailbox, 3, patience_s=0.2, on_held=complain)

    def comes_late(client: CoordinatorClient) -> None:
        while len(named) < 2:
            time.sleep(0.01)

    answers = run.work(lambda client: client.meet(), comes_late, lambda client: client.meet())
    assert named == [[1], [1]]
    assert all("worker 1 stands still" in str(answers[worker]) for worker in (0, 2))
    run.coordinator.close()


def test_workers_that_wait_for_one_another_are_told_so(mailbox: Mailbox) -> None:
    """One is at a meeting, the other wants to be ahead no longer."""
    run = Run(mailbox, 2, patience_s=0.3, distance=0)
    answers = run.work(lambda client: client.meet(), lambda client: client.tick())
    assert all("all ranks have waited for one another for 0.3 s" in str(answer) for answer in answers)
    run.coordinator.close()


def test_everyone_is_told_when_the_run_is_over(mailbox: Mailbox) -> None:
    run = Run(mailbox, 3)
    threading.Timer(0.1, run.coordinator.fail, args=("rank 2 has given no sign of life",)).start()
    found = run.work(lambda client: client.meet(), lambda client: client.meet())
    assert [str(error) for error in found] == ["rank 2 has given no sign of life"] * 2
    (late,) = run.work(lambda client: client.group())
    assert str(late) == "rank 2 has given no sign of life"
    run.coordinator.close()


def test_a_dead_coordinator_is_an_error() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = CoordinatorClient(StoreMailbox("run0", dist.TCPStore("127.0.0.1", store.port, is_master=False)), 1)
    del store
    with pytest.raises(CommunicationError, match="rank 1 waited for the coordinator on rank 0"):
        client.group()
