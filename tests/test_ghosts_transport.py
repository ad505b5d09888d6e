"""Messages between ranks: the double of threads, and gloo between processes."""

import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_port import free_port
from ghost_cases import owners, trial
from ghost_models import MODELS, Outcome, assert_equal, piped_run, planned, single_run, train_stage

from pl_pipe.comm import CommunicationError, Direction, DistributedTransport, LocalNetwork, Message, notices
from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts import TensorSpec

TIMEOUT_S = 60
FORWARD = Message(0, 1, 5, 2, Direction.FORWARD)


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


# ---- threads


def test_what_is_sent_arrives_in_logical_order() -> None:
    network = LocalNetwork()
    sent = torch.arange(6.0).view(2, 3).T
    network.transport().send(FORWARD, sent)
    got = network.transport().receive(FORWARD, spec(3, 2))
    assert torch.equal(got, sent)
    assert got.is_contiguous()
    assert not network.unread()


def test_what_was_sent_may_be_changed() -> None:
    network = LocalNetwork()
    tensor = torch.ones(3)
    network.transport().send(FORWARD, tensor)
    tensor.zero_()
    assert network.transport().receive(FORWARD, spec(3)).sum() == 3


def test_unread_messages_are_named() -> None:
    network = LocalNetwork()
    network.transport().send(FORWARD, torch.ones(3))
    assert [str(message) for message in network.unread()] == ["transfer 2 of batch 5 from stage 0 to stage 1"]


def test_another_shape_than_expected_is_an_error() -> None:
    network = LocalNetwork()
    network.transport().send(FORWARD, torch.ones(3))
    with pytest.raises(CommunicationError, match=r"should be float32\[4\], but float32\[3\] came"):
        network.transport().receive(FORWARD, spec(4))


def test_waiting_in_vain_names_the_message() -> None:
    with pytest.raises(CommunicationError, match=r"stage 1 waited 0.01 s for transfer 2 of batch 5 from stage 0"):
        LocalNetwork(timeout_s=0.01).transport().receive(FORWARD, spec(4))


def test_a_receive_waits_for_its_message() -> None:
    network = LocalNetwork(timeout_s=5)
    timer = threading.Timer(0.05, lambda: network.transport().send(FORWARD, torch.ones(2)))
    timer.start()
    assert network.transport().receive(FORWARD, spec(2)).sum() == 2
    timer.join()


# ---- no tags: what is sent first is received first


class OrderedNetwork(LocalNetwork):
    """As NCCL has it: messages of two stages in one direction come in the order in which they were sent."""

    def __init__(self, *, in_order: bool = True) -> None:
        super().__init__(timeout_s=5 if in_order else 1)
        self._in_order = in_order
        self._lanes: defaultdict[Any, queue.Queue[tuple[Message, torch.Tensor]]] = defaultdict(queue.Queue)

    def transport(self) -> Any:
        return OrderedTransport(self, self._in_order)

    def lane(self, message: Message) -> "queue.Queue[tuple[Message, torch.Tensor]]":
        with self._lock:
            return self._lanes[message.source, message.target, message.direction]


class OrderedTransport:
    def __init__(self, network: OrderedNetwork, in_order: bool) -> None:
        self.network, self.in_order = network, in_order

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        self.network.lane(message).put((message, tensor.detach().clone()))

    def expect(self, message: Message, spec: TensorSpec) -> None:
        pass

    def receive(self, message: Message, spec: TensorSpec) -> torch.Tensor:
        try:
            first, tensor = self.network.lane(message).get(timeout=self.network.timeout_s)
        except queue.Empty:
            raise CommunicationError(f"{message} never came") from None
        if first != message:
            raise StageError(f"{message} is due, {first} came")
        return tensor

    def flush(self, *, before: int | None = None) -> None:
        pass


@pytest.mark.parametrize("name", ["skip", "used_on_every_stage", "two_branches", "unused_layer", "detached"])
def test_messages_keep_their_order(name: str) -> None:
    piped = piped_run(trial(name), owners(name, 3), network=OrderedNetwork())
    assert_equal(piped, single_run(trial(name)))


def test_a_whole_model_keeps_the_order() -> None:
    piped = piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 3), network=OrderedNetwork())
    assert_equal(piped, single_run(MODELS["seq2seq"]))


def test_autograd_itself_would_not_keep_it() -> None:
    with pytest.raises(StageError, match=r"gradient 0 of batch 0 .* is due, gradient [1-9] of batch 0"):
        piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 3), network=OrderedNetwork(in_order=False))


# ---- processes


def _process(rank: int, ranks: int, port: int, work: Callable[..., Any], args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
        results.put((rank, work(rank, *args)))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # a rank whose partner failed must not wait for it at exit


def over_processes(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on each of several gloo processes; their results by rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_process, args=(rank, ranks, port, work, args, results)) for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        found = dict(results.get(timeout=TIMEOUT_S) for _ in processes)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        left = [process for process in processes if process.is_alive()]
        for process in left:
            process.kill()
    assert not left, "processes left behind"
    failed = [result for result in found.values() if isinstance(result, str)]
    assert not failed, failed[0]
    return [found[rank] for rank in range(ranks)]


def _crossing(rank: int) -> list[float]:
    """Both directions, several sizes and dtypes, announced or not, received in another order than sent."""
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    other = 1 - rank
    tensors = [torch.full((size, 2), float(10 * rank + size)) for size in (1, 4, 3)]
    tensors.append(torch.arange(3) + rank)
    incoming = [Message(other, rank, 9, number, Direction.FORWARD) for number in range(4)]
    transport.expect(incoming[2], spec(3, 2))
    for number, tensor in enumerate(tensors):
        transport.send(Message(rank, other, 9, number, Direction.FORWARD), tensor)
        tensor.zero_()
    transport.send(Message(rank, other, 9, 0, Direction.BACKWARD), torch.full((2,), 0.5 + rank))
    got = [transport.receive(Message(other, rank, 9, 0, Direction.BACKWARD), spec(2))]
    got += [transport.receive(incoming[number], spec(size, 2)) for number, size in ((2, 3), (0, 1), (1, 4))]
    got.append(transport.receive(incoming[3], spec(3, dtype=torch.int64)))
    transport.send(Message(rank, other, 9, 1, Direction.BACKWARD), torch.empty(2, 0))
    empty = transport.receive(Message(other, rank, 9, 1, Direction.BACKWARD), spec(2, 0))
    assert empty.shape == (2, 0)
    assert empty.dtype == torch.float32
    transport.flush()
    return [float(tensor.float().mean()) for tensor in got]


def _ahead(rank: int) -> list[float]:
    """What is large comes while its receiver does something else, whatever its shape and dtype."""
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    tensors = [torch.arange(12_000).reshape(3, 2, 2000) + number for number in range(3)]
    tensors.append(torch.full((9000,), 2.5, dtype=torch.bfloat16))
    messages = [Message(0, 1, 4 + number, 0, Direction.FORWARD) for number in range(4)]
    got = []
    if rank == 0:
        for message, tensor in zip(messages, tensors, strict=True):
            transport.send(message, tensor)
    else:
        got = [transport.receive(messages[0], TensorSpec.of(tensors[0]))]  # from now on it listens
        posted, deadline_s = transport._arrivals._posted, time.monotonic() + TIMEOUT_S
        while not all(message in posted and posted[message][0].is_completed() for message in messages[1:]):
            assert time.monotonic() < deadline_s, "only what is asked for comes"
            time.sleep(0.01)
        sent = list(zip(messages, tensors, strict=True))
        got += [transport.receive(message, TensorSpec.of(tensor)) for message, tensor in sent[1:]]
        assert all(torch.equal(one, other) for one, other in zip(got, tensors, strict=True))
    transport.flush()
    transport.close()
    return [float(tensor.double().mean()) for tensor in got]


def _waiting(rank: int) -> list[str]:
    """Rank 0 never sends."""
    transport = DistributedTransport(timeout_s=1.0)
    if rank == 0:
        time.sleep(2)
        return []
    try:
        transport.receive(Message(0, 1, 3, 0, Direction.FORWARD), spec(2))
    except CommunicationError as error:
        return [str(error)]
    return ["received"]


def _train(rank: int, name: str, stages: int, in_order: bool = False) -> tuple[list[float], float]:
    """Losses, and a sum over this rank's state at the end."""
    outcome = Outcome()
    trial = MODELS[name]
    trial = trial._replace(batches=trial.batches * 2)
    torch.manual_seed(0)
    model = trial.build()
    transport = DistributedTransport(timeout_s=TIMEOUT_S, in_order=in_order)
    train_stage(trial, model, planned(trial, stages), rank, transport, outcome)
    transport.flush()
    transport.close()
    total = sum(tensor.double().abs().sum().item() for tensor in outcome.state.values())
    return outcome.losses, total


def _all(rank: int) -> tuple[list[float], tuple[list[float], float], list[str]]:
    """In one pair of processes, because starting them takes longer than all the rest."""
    return _crossing(rank), _train(rank, "seq2seq", 2), _waiting(rank)


def assert_trained(name: str, results: list[tuple[list[float], float]]) -> None:
    """Lengths vary from batch to batch; later batches are announced."""
    single = single_run(MODELS[name]._replace(batches=MODELS[name].batches * 2))
    assert results[-1][0] == single.losses
    expected = sum(tensor.double().abs().sum().item() for tensor in single.state.values())
    assert sum(total for _, total in results) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_two_processes() -> None:
    first, second = over_processes(2, _all)
    assert first[0] == [1.5, 13.0, 11.0, 14.0, 2.0], "messages of many shapes"
    assert second[0] == [0.5, 3.0, 1.0, 4.0, 1.0]
    assert_trained("seq2seq", [first[1], second[1]])
    (message,) = second[2]
    assert "stage 1 waited for transfer 0 of batch 3 from stage 0 to stage 1" in message


def _train_twice(rank: int) -> list[tuple[list[float], float]]:
    """With notices of the smallest messages, and without any."""
    notices.WORTH_BYTES = 0
    return [_train(rank, "packed", 3), _train(rank, "seq2seq", 3, True)]


def test_large_messages_come_ahead_of_their_turn() -> None:
    assert over_processes(2, _ahead) == [[], [5999.5, 6000.5, 6001.5, 2.5]]


def test_three_processes_equal_the_single_run() -> None:
    """With tags, and then without, through a group for each pair and direction."""
    found = over_processes(3, _train_twice)
    assert_trained("packed", [first for first, _ in found])
    assert_trained("seq2seq", [second for _, second in found])
