"""Topologies: sums over trees, first among threads, then among processes."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pipedream_farm import Farm, Order
from torch import Tensor

from pl_pipe.comm import CommunicationError
from pl_pipe.comm.topology import (
    NAMES,
    AdaptableSums,
    LocalMailboxes,
    SumTree,
    Topology,
    TopologySumming,
    TrafficWatch,
    candidates,
    checked_setting,
    compile_rounds,
    minimum_spanning_tree,
    topology_of,
)
from pl_pipe.comm.topology.adaptable import trial_bytes, whole_trial_bytes
from pl_pipe.comm.topology.traffic import in_flight_s
from pl_pipe.errors import ConfigError
from pl_pipe.report.topology_picture import draw_topology

pytest_plugins = "pipedream_plugin"

PIECE_BYTES = 64
SIZES = (0, 1, 17, 150)  # the last is several pieces in every tree
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)


def hosts_of(ranks: int, on_each: int = 2) -> list[str]:
    return [f"host{rank // on_each}" for rank in range(ranks)]


def latencies(ranks: int, seed: int = 0) -> list[list[float]]:
    return torch.rand(ranks, ranks, generator=torch.Generator().manual_seed(seed)).tolist()


def every_topology(ranks: int, on_each: int = 2) -> list[Topology]:
    hosts = hosts_of(ranks, on_each)
    chain = [max(0, rank - 1) for rank in range(ranks)]
    settings: list[Any] = [name for name in NAMES if name not in ("auto", "native")]
    found = [topology_of(setting, hosts, latencies_s=latencies(ranks)) for setting in [*settings, chain]]
    return [*found, topology_of(f"star@{ranks - 1}", hosts)]


def summed(
    topology: Topology, tensors: Sequence[Tensor], piece_bytes: int = PIECE_BYTES, watches: Sequence[Any] = ()
) -> list[Tensor]:
    """What each rank has in the end."""
    boxes = LocalMailboxes(topology.ranks)
    found = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    small = max(1, piece_bytes // max(1, len(topology.trees)))  # pieces are that many times larger
    ends = [TopologySumming(topology, boxes.of(rank), piece_bytes=small) for rank in range(topology.ranks)]
    for end, watch in zip(ends, watches, strict=False):
        end.watch = watch
    pending = [end.start(tensor) for end, tensor in zip(ends, found, strict=True)]
    for one in pending:
        one.wait()
    for end in ends:
        end.close()
    assert boxes.unread() == 0
    return found


def whole_numbers(ranks: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Whose sum every type holds exactly."""
    draws = torch.Generator().manual_seed(size * 100 + ranks)
    return [torch.randint(-10, 11, (size,), generator=draws).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_topology_gives_the_exact_sum(ranks: int) -> None:
    for topology in every_topology(ranks):
        for size in SIZES:
            tensors = whole_numbers(ranks, size, torch.float32)
            expected = torch.stack(tensors).sum(0)
            for rank, total in enumerate(summed(topology, tensors)):
                assert torch.equal(total, expected), f"{topology.name}, {ranks} ranks, {size} elements, rank {rank}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_summed(dtype: torch.dtype) -> None:
    for topology in every_topology(5):
        tensors = whole_numbers(5, 131, dtype)
        expected = torch.stack(tensors).sum(0).to(dtype)
        assert all(torch.equal(total, expected) for total in summed(topology, tensors)), topology.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_repeat_bit_for_bit_and_are_the_same_everywhere(dtype: torch.dtype) -> None:
    tensors = list(torch.randn(7, 200, generator=torch.Generator().manual_seed(3)).to(dtype))
    for topology in every_topology(7):
        first, second = summed(topology, tensors), summed(topology, tensors)
        assert all(torch.equal(one, first[0]) for one in [*first, *second]), topology.name
        exact = torch.stack(tensors).double().sum(0)
        # on each rank halves are rounded once, so a sum over k levels is off by about k units in the last place
        tolerance = 1e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(first[0].double(), exact, atol=tolerance, rtol=0)


def test_halves_are_added_up_in_float32_on_each_rank() -> None:
    """256 + 1 + 1 + 1 + 1 is 256 if each sum is rounded to bf16, and 260 if the last one is."""
    tensors = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    assert summed(topology_of("star", hosts_of(5)), tensors)[0].item() == 260.0


def test_a_tensor_that_is_not_contiguous_is_summed_in_place() -> None:
    tensors = [torch.arange(12.0).view(3, 4).t() + rank for rank in range(3)]
    (total, *_) = summed(topology_of("ring", hosts_of(3)), tensors)
    assert torch.equal(total, sum(tensors, torch.zeros(4, 3)))
    assert total.stride() == tensors[0].stride()


@pytest.mark.parametrize("name", ["ring", "clique"])
def test_ring_and_clique_send_no_more_than_they_must(name: str) -> None:
    ranks, elements = 4, 400
    boxes = LocalMailboxes(ranks)
    ends = [TopologySumming(topology_of(name, hosts_of(ranks)), boxes.of(rank)) for rank in range(ranks)]
    pending = [end.start(torch.ones(elements)) for end in ends]
    for one, end in zip(pending, ends, strict=True):
        one.wait()
        end.close()
    assert boxes.sent_bytes == [4 * elements * 2 * (ranks - 1) // ranks] * ranks


def test_shapes_follow_the_hosts() -> None:
    hosts = ["a", "a", "b", "b", "c", "c", "d"]

    def fathers(name: str) -> list[list[int]]:
        return [list(tree.up) for tree in topology_of(name, hosts).trees]

    assert fathers("star") == [[0] * 7]
    assert fathers("tree") == [[0, 0, 0, 2, 0, 4, 0]]
    assert fathers("multi_star") == [
        [0, 0, 0, 2, 0, 4, 0], [2, 0, 2, 2, 2, 4, 2], [4, 0, 4, 2, 4, 4, 4], [6, 0, 6, 2, 6, 4, 6]
    ]  # fmt: skip
    assert fathers("binary_tree") == [[0, 0, 0, 1, 1, 2, 2]]
    assert fathers("binary_tree_star") == [[0, 0, 0, 2, 0, 4, 2]]
    assert fathers("multi_binary_tree_star")[1] == [4, 0, 2, 2, 2, 4, 2]
    assert [tree.root for tree in topology_of("multi_binary_tree_star", hosts).trees] == [0, 2, 4, 6]
    assert topology_of("ring", hosts[:3]).trees[1] == SumTree(up=(1, 1, 0), down=(2, 1, 1))


def test_the_spanning_tree_takes_the_quickest_links() -> None:
    far = 9.0
    latencies_s = [
        [0.0, 1.0, far, far],
        [1.0, 0.0, 1.0, far],
        [far, 1.0, 0.0, 2.0],
        [far, far, 4.0, 0.0],  # the pair's mean is 3
    ]
    (tree,) = minimum_spanning_tree(latencies_s).trees
    assert {frozenset(link) for link in enumerate(tree.up) if link[0] != link[1]} == {
        frozenset({0, 1}), frozenset({1, 2}), frozenset({2, 3})
    }  # fmt: skip
    assert tree.root == 2, "its farthest rank is 3 s away, that of rank 1 is 4 s"
    with pytest.raises(ConfigError, match="latency from rank 1 to rank 0 is nan"):
        minimum_spanning_tree([[0.0, 1.0], [float("nan"), 0.0]])


@pytest.mark.parametrize("ranks", [3, 6])
def test_nobody_sends_what_is_not_there_yet(ranks: int) -> None:
    """The rounds of all ranks are played with sets of who is summed: in the end everyone has everyone's, once."""
    for topology in every_topology(ranks):
        programs = compile_rounds(topology, 100, most_elements=7)
        pieces = {one.piece for program in programs for turn in program for one in (*turn.sends, *turn.receives)}
        sums = [{piece: {rank} for piece in pieces} for rank in range(ranks)]
        under_way: dict[int, tuple[int, int, set[int]]] = {}
        left, has_sent = [list(program) for program in programs], [False] * ranks
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(left):
                if program and not has_sent[rank]:
                    for one in program[0].sends:
                        under_way[one.number] = (rank, one.peer, set(sums[rank][one.piece]))
                    moved = has_sent[rank] = True
                if program and all(one.number in under_way for one in program[0].receives):
                    for one in program[0].receives:
                        source, target, summed = under_way.pop(one.number)
                        assert (source, target) == (one.peer, rank)
                        assert not (one.adds and summed & sums[rank][one.piece]), "nobody is added twice"
                        sums[rank][one.piece] = summed | (sums[rank][one.piece] if one.adds else set())
                    program.pop(0)
                    has_sent[rank], moved = False, True
        assert not any(left), "ranks wait for each other"
        assert not under_way
        assert all(summed == set(range(ranks)) for own in sums for summed in own.values()), topology.name


@pytest.mark.parametrize(
    ("fathers", "words"),
    [
        ([0, 1, 0], r"has 2 roots \(\[0, 1\]\)"),
        ([1, 2, 0], "has 0 roots"),
        ([0, 2, 3, 1], "has a cycle: 1 -> 2 -> 3 -> 1"),
        ([0, 0, 7], "gives rank 2 the father 7; choose ranks from 0 to 2"),
        ([0, -1], "gives rank 1 the father -1"),
    ],
)
def test_an_array_that_is_no_tree_is_refused(fathers: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_setting(fathers)


def test_a_setting_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology=tri is unknown; choose one of star"):
        checked_setting("tri")
    with pytest.raises(ConfigError, match="has 2 entries, there are 3 ranks"):
        topology_of([0, 0], hosts_of(3))
    with pytest.raises(ConfigError, match="topology=star@3, but there are 3 ranks"):
        topology_of("star@3", hosts_of(3))
    with pytest.raises(ConfigError, match="needs measured latencies"):
        topology_of("minimum_spanning_tree", hosts_of(3))
    with pytest.raises(ConfigError, match="native needs a process group"):
        TopologySumming(topology_of("native", hosts_of(2)), LocalMailboxes(2).of(0))


def test_candidates_differ_in_their_messages() -> None:
    found = candidates(hosts_of(4, on_each=1))
    names = [topology.name for topology in found]
    assert names[0] == "native"
    assert {"ring", "clique", "star", "star@1", "star@3"} <= set(names)
    assert "tree" not in names, "with one rank a host it is the star"
    assert len({topology.digest() for topology in found}) == len(found)


def test_a_partner_that_never_comes_is_an_error_now_and_later() -> None:
    boxes = LocalMailboxes(2, timeout_s=0.05)
    end = TopologySumming(topology_of("star", hosts_of(2)), boxes.of(0))
    for _ in range(2):
        with pytest.raises(CommunicationError, match="rank 0 waited in vain for a part of a sum of rank 1"):
            end.start(torch.ones(3)).wait()
    end.close()
    with pytest.raises(CommunicationError, match="after the ranks had parted"):
        end.start(torch.ones(3))


def test_time_in_flight_is_that_of_the_union() -> None:
    assert in_flight_s([(0.0, 2.0, 1), (1.0, 3.0, 1), (5.0, 6.0, 1), (5.2, 5.4, 1)]) == pytest.approx(4.0)
    assert in_flight_s([]) == 0.0


def test_traffic_is_noted_by_link() -> None:
    watches = [TrafficWatch() for _ in range(3)]
    tensors = whole_numbers(3, 300, torch.float32)
    found = summed(topology_of("star", hosts_of(3)), tensors, watches=watches)
    assert torch.equal(found[1], sum(tensors, torch.zeros(300)))
    for watch in watches:
        watch.settle()
    uses = [watch.take() for watch in watches]
    assert {rank: {peer: use.size_bytes for peer, use in one.items()} for rank, one in enumerate(uses)} == {
        0: {1: 1200, 2: 1200}, 1: {0: 1200}, 2: {0: 1200}
    }  # fmt: skip
    assert all(use.in_flight_s >= 0 for one in uses for use in one.values())
    assert watches[0].take() == {}


def test_a_late_sender_is_no_slow_link() -> None:
    """The receiver is ready from the beginning; the message is in flight only once its sender has begun."""
    watch = TrafficWatch()
    boxes = LocalMailboxes(2)
    ends = [TopologySumming(topology_of("star", hosts_of(2)), boxes.of(rank)) for rank in range(2)]
    clocks = [TrafficWatch(), watch]
    for end, one in zip(ends, clocks, strict=True):
        end.watch = one
    early = ends[1].start(torch.ones(4))
    time.sleep(0.3)
    ends[0].start(torch.ones(4)).wait()
    early.wait()
    watch.settle()
    for end in ends:
        end.close()
    assert watch.take()[0].in_flight_s < 0.2


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for topology in [topology_of(name, hosts_of(5)) for name in ("ring", "tree", "native")]:
        path = tmp_path / f"{topology.name}.png"
        draw_topology(topology, hosts_of(5), path)
        assert path.read_bytes()[:4] == b"\x89PNG"


# ---- among processes

SUMS = Order("adaptive_tasks.sums", ranks=4, names=["star", "ring", "clique", "multi_binary_tree_star", "native"])
WATCHED = Order("adaptive_tasks.watched", ranks=2)
THREE = Order("adaptive_tasks.sums", ranks=3, names=["binary_tree", "minimum_spanning_tree", "ring"])


@pytest.mark.parametrize("order", [SUMS, pytest.param(THREE, marks=pytest.mark.slow)], ids=["four", "three"])
def test_processes_sum_as_threads_do(farm: Farm, order: Order) -> None:
    outcome = farm.start(order).outcome
    for name in order.options["names"]:
        for size in (0, 1, 999, 100_001):
            for dtype in ("float32", "bfloat16", "int64"):
                key = f"{name} {size} {dtype}"
                expected = outcome[0]["expected"][key]
                for rank, result in enumerate(outcome):
                    assert torch.equal(result["sums"][key], expected), f"{key} on rank {rank}"


def test_clocks_and_trials_go_by_groups_of_their_own(farm: Farm) -> None:
    """The default group may be NCCL's, which carries nothing that lies on a CPU."""
    for result in farm.start(WATCHED).outcome:
        assert result["links"][0][1][0] == result["links"][1][0][0] == 40_000, (
            "bytes between the star's centre and rank 1"
        )
        assert result["trials"].keys() == {"star", "native"}


def test_trials_lie_where_gradients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native sums of a GPU's gradients are NCCL's, and others go through the host's memory: trials must too."""
    summing = Mock(watch=None)
    monkeypatch.setattr("torch.distributed.barrier", Mock())
    monkeypatch.setattr("torch.distributed.all_reduce", Mock())
    sums = AdaptableSums.__new__(AdaptableSums)
    sums.summing, sums.control = summing, None
    sums._device, sums._gradient_bytes = torch.device("meta"), 1 << 10
    sums.trial([topology_of("native", ["a", "b"])], turns=1)
    assert summing.start.call_args.args[0].device.type == "meta"


@pytest.mark.parametrize(
    ("gradients", "small", "whole"), [(1 << 10, 256, 256), (8 << 20, 2048, 8192), (1 << 30, 4096, 24576)]
)
def test_trials_are_as_large_as_they_must_be(gradients: int, small: int, whole: int) -> None:
    assert (trial_bytes(gradients) >> 10, whole_trial_bytes(gradients) >> 10) == (small, whole)
