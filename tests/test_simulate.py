"""The simulator against closed forms, hand-made timetables, and a brute-force solver of its own."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pl_pipe.cluster import Cluster, Level
from pl_pipe.errors import ConfigError, ScheduleError
from pl_pipe.events import Event
from pl_pipe.graph import LayerGraph, LayerNode
from pl_pipe.partition import Plan, Transfer
from pl_pipe.schedule import SCHEDULES, Action, Kind, Programs, build_programs, parse_programs, warmups
from pl_pipe.simulate import (
    Simulation,
    SimulationOptions,
    SweepPoint,
    data_parallel_plan,
    simulate,
    simulate_data_parallel,
    simulate_single_device,
    single_device_plan,
    steady_batches,
    sweep,
)
from tests.test_schedule import plan_of

EXACT = {"rel": 1e-9, "abs": 1e-12}


def run(plan: Plan, schedule: str = "pipedream", batches: int | None = None, **settings_: object) -> Simulation:
    """Simulates; settings that the schedule does not know go to the simulator."""
    of_schedule = {name: settings_.pop(name) for name in ("accumulate", "update", "deeper") if name in settings_}
    programs = build_programs(plan, schedule=schedule, batches=batches or steady_batches(plan), **of_schedule)  # type: ignore[arg-type]
    return simulate(plan, programs, options=SimulationOptions(**settings_))  # type: ignore[arg-type]


def starts(simulation: Simulation, kind: str, batch: int) -> dict[int, float]:
    """By stage, when a mini-batch's forward or backward begins."""
    return {event.stage: event.start_s for event in simulation.events if (event.kind, event.batch) == (kind, batch)}


# --- Closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "group"), [(1, 1), (2, 3), (4, 4), (4, 16), (7, 5)])
def test_gpipe_takes_a_slot_for_each_mini_batch_and_stage(stages: int, group: int) -> None:
    plan = plan_of((1,) * stages, costs_s=[(0.3, 0.7)] * stages)
    once = run(plan, "gpipe", batches=group, accumulate=group)
    assert once.makespan_s == pytest.approx((group + stages - 1) * 1.0, **EXACT)
    many = run(plan, "gpipe", batches=5 * group, accumulate=group)
    assert many.makespan_s == pytest.approx(5 * (group + stages - 1), **EXACT)
    assert many.step_s == pytest.approx((group + stages - 1) / group, **EXACT)
    assert many.bubble_fraction == pytest.approx((stages - 1) / (group + stages - 1), **EXACT)


@pytest.mark.parametrize(("stages", "group"), [(2, 3), (4, 8)])
def test_1f1b_with_flushes_is_as_fast_as_gpipe(stages: int, group: int) -> None:
    plan = plan_of((1,) * stages, costs_s=[(0.3, 0.7)] * stages)
    flushed = run(plan, "1f1b", batches=4 * group + 1, accumulate=group)
    group_s = group + stages - 1
    assert flushed.step_s == pytest.approx(group_s / group, **EXACT)
    assert flushed.window_s == pytest.approx((2 * group_s, 4 * group_s), **EXACT)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), min_size=1, max_size=6), st.data())
def test_a_straight_pipeline_is_as_fast_as_its_slowest_stage(
    costs_s: list[tuple[float, float]], data: st.DataObject
) -> None:
    """One stage is made slower than the others by a quarter; a pipeline of nearly equal ones takes long to settle."""
    place = data.draw(st.integers(0, len(costs_s) - 1))
    slowest_s = 1.25 * max(map(sum, costs_s))
    scale = slowest_s / sum(costs_s[place])
    costs_s[place] = costs_s[place][0] * scale, costs_s[place][1] * scale
    plan = plan_of((1,) * len(costs_s), costs_s=costs_s)
    for schedule in ("pipedream", "pipedream_2bw"):
        found = run(plan, schedule, batches=150)
        assert found.step_s == pytest.approx(slowest_s, rel=1e-9)
        assert found.throughput == pytest.approx(1 / slowest_s, rel=1e-9)


@pytest.mark.parametrize("update", ["minibatch", "round"])
@pytest.mark.parametrize(
    ("first", "second"), [((1.0, 2.0), (0.3, 0.5)), ((1.0, 2.0), (0.5, 0.9)), ((1.0, 2.0), (0.4, 0.6))]
)
def test_three_replicas_share_the_work(update: str, first: tuple[float, float], second: tuple[float, float]) -> None:
    found = run(plan_of((3, 1), costs_s=[first, second]), batches=300, update=update)
    assert found.step_s == pytest.approx(max(sum(first) / 3, sum(second)), **EXACT)
    busy = [sum(first) / 3 / found.step_s] * 3 + [sum(second) / found.step_s]
    assert [found.utilisation[rank] for rank in range(4)] == pytest.approx(busy, rel=0.02)
    assert found.bubble_fraction == pytest.approx(1 - sum(found.utilisation.values()) / 4, **EXACT)


def test_a_full_pipeline_of_equal_stages_has_no_bubble() -> None:
    found = run(plan_of((1,) * 4), batches=100)
    assert found.bubble_fraction == pytest.approx(0.0, abs=1e-9)
    assert set(found.utilisation) == {0, 1, 2, 3}
    assert found.window_s[1] - found.window_s[0] == pytest.approx(found.step_s * 48, **EXACT)


def test_a_link_sets_the_pace_of_a_flushing_pipeline() -> None:
    """m activations one after the other, then m gradients, and the first and last computations around them."""
    wire_s, group = 5.0, 6
    plan = plan_of((1, 1), costs_s=[(0.1, 0.2), (0.3, 0.4)], size_bytes=5000, cluster=Cluster.flat(2, 1000.0))
    found = run(plan, "gpipe", batches=group, accumulate=group)
    assert found.makespan_s == pytest.approx(0.1 + group * wire_s + 0.3 + 0.4 + group * wire_s + 0.2, **EXACT)


def test_a_link_sets_the_pace_of_a_replicated_stage() -> None:
    """All activations of four replicas enter one worker: a mini-batch each bytes / bandwidth."""
    costs_s = [(0.5, 1.0), (0.01, 0.02)]
    plan = plan_of((4, 1), costs_s=costs_s, size_bytes=1000, cluster=Cluster.flat(5, 1000.0))
    found = run(plan, batches=200, update="minibatch")
    assert found.step_s == pytest.approx(1.0, rel=1e-6)
    assert found.utilisation[4] == pytest.approx(0.03, rel=1e-3)


def test_in_flight_mini_batches_limit_the_pace_when_messages_are_slow() -> None:
    """Two in flight over a round trip of compute and two messages: the rule of 1F1B does not hide communication."""
    plan = plan_of((1, 1), costs_s=[(1.0, 2.0), (1.0, 2.0)], size_bytes=500, cluster=Cluster.flat(2, 1000.0))
    assert run(plan, batches=100).step_s == pytest.approx((6.0 + 2 * 0.5) / 2, **EXACT)
    deeper = run(plan, batches=100, deeper=1)
    assert deeper.step_s == pytest.approx(3.0, **EXACT), "three in flight hide the messages"
    assert deeper.max_staleness == (2, 0)


def test_a_straggler_sets_the_pace() -> None:
    plan = plan_of((1, 1, 1))
    assert run(plan, batches=60, slowdown={1: 2.5}).step_s == pytest.approx(7.5, **EXACT)
    assert run(plan_of((3,)), batches=60, slowdown={1: 2.5}).step_s == pytest.approx(7.5 / 3, **EXACT)


def test_jitter_is_repeatable_and_of_mean_one() -> None:
    plan = plan_of((1,))
    first, again, other = (run(plan, batches=4000, jitter=0.3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.makespan_s != other.makespan_s
    lasts_s = [event.duration_s for event in first.events if event.kind == "forward"]
    assert len(set(lasts_s)) == 4000
    assert sum(lasts_s) / 4000 == pytest.approx(1.0, abs=4 * 0.3 / math.sqrt(4000))
    logarithms = [math.log(value) for value in lasts_s]
    mean = sum(logarithms) / 4000
    assert math.sqrt(sum((value - mean) ** 2 for value in logarithms) / 4000) == pytest.approx(0.3, rel=0.05)


def test_each_rank_has_its_own_jitter() -> None:
    found = run(plan_of((2,)), batches=20, jitter=0.1)
    assert {event.duration_s for event in found.events if event.rank == 0 and event.kind == "forward"}.isdisjoint(
        {event.duration_s for event in found.events if event.rank == 1 and event.kind == "forward"}
    )


def test_link_jitter_varies_messages_alone_and_is_of_mean_one() -> None:
    plan = plan_of((1, 1), size_bytes=1000, cluster=Cluster.flat(2, 1e4))
    first, again, other = (run(plan, batches=2000, link_jitter=0.3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.makespan_s != other.makespan_s
    assert len({round(event.duration_s, 9) for event in first.events if event.kind == "forward"}) == 1
    steady = run(plan, batches=2000)
    lasts_s, usual_s = (
        [event.duration_s for event in found.events if event.kind == "send" and event.stage == 1]
        for found in (first, steady)
    )
    assert len(set(lasts_s)) > 1000
    assert sum(lasts_s) / len(lasts_s) == pytest.approx(usual_s[0], rel=0.05)


# --- All-reduce -----------------------------------------------------------------------------------------------------

REDUCED = plan_of((4,), costs_s=[(1.0, 2.0)], parameter_bytes=4000, cluster=Cluster.flat(4, 1000.0))
"""An all-reduce of 2 * 3/4 * 4000 / 1000 = 6 s."""


def test_an_all_reduce_runs_beside_the_backward() -> None:
    assert run(REDUCED, batches=80).step_s == pytest.approx((1.0 + 6.0) / 4, **EXACT)
    fast = replace(REDUCED, cluster=Cluster.flat(4, 10_000.0))
    assert run(fast, batches=80).step_s == pytest.approx((1.0 + 2.0) / 4, **EXACT)


def test_without_overlap_an_all_reduce_comes_after_the_backward() -> None:
    found = run(REDUCED, batches=80, overlap=False)
    assert found.step_s == pytest.approx((1.0 + 2.0 + 6.0) / 4, **EXACT)
    (first,) = {
        (event.start_s, event.end_s) for event in found.events if event.kind == "all_reduce" and event.batch < 4
    }
    assert first == pytest.approx((3.0, 9.0), **EXACT)


def test_an_update_takes_its_time_too() -> None:
    found = run(REDUCED, batches=80, update_s=0.5, slowdown={3: 1.0})
    assert found.step_s == pytest.approx((1.0 + 6.0 + 0.5) / 4, **EXACT)
    first = next(event for event in found.events if event.kind == "update")
    assert (first.start_s, first.end_s) == pytest.approx((7.0, 7.5), **EXACT)


def test_replicas_gather_a_round_before_they_exchange_it() -> None:
    """Stage 1 has two mini-batches of each round of two: its all-reduce partner is itself, stage 0's is not."""
    plan = plan_of((2, 1), costs_s=[(1.0, 1.0), (0.1, 0.1)], parameter_bytes=1000, cluster=Cluster.flat(3, 1000.0))
    found = run(plan, batches=40, update="round")
    reduces = [event for event in found.events if event.kind == "all_reduce"]
    assert len(reduces) == 2 * 20
    assert {event.stage for event in reduces} == {0}
    assert sum(found.all_reduce_bytes) == 20 * 2 * 1000


def test_an_all_reduce_waits_for_its_last_member() -> None:
    found = run(replace(REDUCED), batches=4, slowdown={2: 3.0})
    (span,) = {(event.start_s, event.end_s) for event in found.events if event.kind == "all_reduce"}
    assert span == pytest.approx((3.0, 9.0), **EXACT)


def test_an_all_reduce_and_a_message_share_a_port() -> None:
    """Ranks 0 and 1 exchange 8 s of gradients from 3.0 on; at 3.5 rank 2 sends 0 what it needs for B2.

    Both enter rank 0, at half speed each: the message of 0.25 s is there at 4.0, and what rank 1 sends rank 0 is later
    by the 0.25 s that the message took; what rank 0 sends is not.
    """
    costs_s = [(1.0, 1.0), (0.25, 0.5)]
    plan = plan_of((2, 1), costs_s=costs_s, size_bytes=250, parameter_bytes=8000, cluster=Cluster.flat(3, 1000.0))
    found = run(plan, batches=4, update="minibatch")
    reduce = next(event for event in found.events if event.kind == "all_reduce")
    assert (reduce.start_s, reduce.end_s) == pytest.approx((3.0, 11.25), **EXACT)
    sent = next(event for event in found.events if event.kind == "send" and event.rank == 2 and event.batch == 2)
    assert (sent.start_s, sent.end_s) == pytest.approx((3.5, 4.0), **EXACT)
    assert starts(found, "backward", 2)[0] == pytest.approx(11.25, **EXACT)


def test_a_message_is_slowed_down_by_an_all_reduce_that_begins() -> None:
    """Rank 0 receives 4 s of gradient from 13.85 on; from 13.95 to 15.95 it exchanges 1 s, both at half speed."""
    costs_s = [(1.0, 1.0), (0.25, 0.5)]
    cluster = Cluster.flat(3, 1000.0, latency_s=0.1)
    plan = plan_of((2, 1), costs_s=costs_s, size_bytes=4000, parameter_bytes=1000, cluster=cluster)
    found = run(plan, batches=4, update="minibatch")
    gradient = next(event for event in found.events if event.kind == "send" and event.rank == 2 and event.batch == 2)
    assert (gradient.start_s, gradient.end_s) == pytest.approx((13.85, 13.85 + 4.0 + 1.0 + 0.1), **EXACT)
    reduce = next(event for event in found.events if event.kind == "all_reduce")
    assert (reduce.start_s, reduce.end_s) == pytest.approx((13.95, 13.95 + 2 * 1.0 + 2 * 0.1), **EXACT)


def test_members_of_an_all_reduce_are_held_up_one_by_one() -> None:
    """Three ranks exchange 4 s; meanwhile each sends 1 s to a fourth, which takes one after the other.

    Every way of the ring has 1 s of something else beside it, so all is over after 5 s; in step it would be 4 + 3.
    """
    costs_s = [(1.0, 1.0), (0.001, 0.001)]
    plan = plan_of((3, 1), costs_s=costs_s, size_bytes=1000, parameter_bytes=3000, cluster=Cluster.flat(4, 1000.0))
    programs = build_programs(plan, schedule="gpipe", batches=3, accumulate=3)
    sends = "\n".join(f"{rank}: F{rank} B{rank} SA{rank}>3 U{rank}" for rank in range(3))
    programs = replace(programs, by_rank=parse_programs(f"{sends}\n3: RA0<0 RA1<1 RA2<2 F0 F1 F2 B0 B1 B2 U2"))
    found = simulate(plan, programs, options=SimulationOptions(overlap=False))
    (end_s,) = {event.end_s for event in found.events if event.kind == "all_reduce"}
    assert end_s == pytest.approx(2.0 + 5.0, **EXACT)


def test_the_latency_of_an_all_reduce_does_not_take_ports() -> None:
    """Two ranks exchange nothing but a latency of 2 * 10 s from 2.0 on; what rank 2 sends meanwhile is not held up."""
    costs_s = [(1.0, 1.0), (0.25, 0.5)]
    cluster = Cluster.flat(3, 1000.0, latency_s=10.0)
    plan = plan_of((2, 1), costs_s=costs_s, cluster=cluster)
    found = run(plan, batches=4, update="minibatch")
    first = next(event for event in found.events if event.kind == "all_reduce")
    assert first.duration_s == pytest.approx(20.0, **EXACT)
    assert starts(found, "backward", 1)[0] == pytest.approx(1.0 + 10.0 + 2 * 0.75 + 10.0, **EXACT)


# --- Ports ----------------------------------------------------------------------------------------------------------


def test_a_receiver_takes_one_message_after_the_other() -> None:
    """Four replicas end their forwards together; rank 4 takes one activation after the other, the oldest first."""
    plan = plan_of(
        (4, 1), costs_s=[(1.0, 1.0), (0.1, 0.1)], size_bytes=500, cluster=Cluster.flat(5, 1000.0, latency_s=0.05)
    )
    found = run(plan, "gpipe", batches=4, accumulate=4)
    assert [starts(found, "forward", batch)[1] for batch in range(4)] == pytest.approx(
        [1.55, 2.05, 2.55, 3.05], **EXACT
    )
    sends = [(event.start_s, event.end_s) for event in found.events if event.kind == "send" and event.rank < 4]
    assert sends == [pytest.approx((1.0, end_s), **EXACT) for end_s in (1.55, 2.05, 2.55, 3.05)]


def test_messages_to_two_receivers_share_the_senders_port() -> None:
    """Rank 0 sends 2 s at 1.0 and 2 s at 2.0: one half of the first is gone, and the other takes twice as long."""
    plan = plan_of((1, 2), costs_s=[(1.0, 1.0), (5.0, 5.0)], size_bytes=2000, cluster=Cluster.flat(3, 1000.0))
    found = run(plan, "gpipe", batches=2, accumulate=2)
    sends = [(event.start_s, event.end_s) for event in found.events if event.kind == "send" and event.rank == 0]
    assert sends == [(1.0, 4.0), (2.0, 5.0)]
    assert [starts(found, "forward", batch)[1] for batch in range(2)] == [4.0, 5.0]


def test_a_message_does_not_take_its_senders_port_before_its_turn() -> None:
    """Stage 3 takes 1 s from rank 0, which shares its port with 3 s for stage 2 until 3.0; then 1 s from rank 1."""
    costs_s = [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    plan = plan_of((1,) * 4, costs_s=costs_s, cluster=Cluster.flat(4, 1000.0))
    plan = replace(plan, transfers=(Transfer(0, 2, 3000), Transfer(0, 3, 1000), Transfer(1, 3, 1000)))
    found = run(plan, "gpipe", batches=1, accumulate=1)
    assert starts(found, "forward", 0) == pytest.approx({0: 0.0, 1: 0.0, 2: 5.0, 3: 4.0}, **EXACT)


def test_what_a_rank_stands_still_for_comes_beside_what_is_on_its_way() -> None:
    """Rank 2 takes 4 s of batch 0, ready at 1.0; batch 1, ready at 2.0, is waited for and does not wait for that."""
    plan = plan_of((2, 1), costs_s=[(1.0, 1.0), (1.0, 1.0)], size_bytes=4000, cluster=Cluster.flat(3, 1000.0))
    programs = build_programs(plan, schedule="gpipe", batches=2, accumulate=2)
    texts = "0: F0 SA0>2 B0 U0\n1: F1 B1 SA1>2 U1\n2: RA1<1 RA0<0 F0 F1 B0 B1 U1"
    found = simulate(plan, replace(programs, by_rank=parse_programs(texts)))
    ends_s = {event.rank: event.end_s for event in found.events if event.kind == "send"}
    assert ends_s == pytest.approx({0: 1.0 + 1.0 + 3.0 * 2, 1: 2.0 + 3.0 * 2 + 1.0}, **EXACT)


TWO_HOSTS = Cluster((Level(2, 1e4), Level(2, 1000.0, latency_s=0.25)))


@pytest.mark.parametrize(("shared", "start_s"), [(True, 1 + 2 * 0.5 + 0.25), (False, 1 + 0.5 + 0.25)])
def test_workers_of_a_host_share_its_network_card(shared: bool, start_s: float) -> None:
    plan = plan_of((2, 2), costs_s=[(1.0, 1.0), (1.0, 1.0)], size_bytes=500, cluster=TWO_HOSTS)
    found = run(plan, "gpipe", batches=2, accumulate=2, shared_ports=shared)
    assert [starts(found, "forward", batch)[1] for batch in range(2)] == pytest.approx([start_s, start_s], **EXACT)


def test_other_hosts_have_cards_of_their_own() -> None:
    cluster = Cluster((Level(2, 1e4), Level(4, 1000.0, latency_s=0.25)))
    plan = plan_of((2, 2), costs_s=[(1.0, 1.0)] * 2, size_bytes=500, cluster=cluster, ranks=(0, 2, 4, 6))
    found = run(plan, "gpipe", batches=2, accumulate=2)
    assert [starts(found, "forward", batch)[1] for batch in range(2)] == pytest.approx([1.75, 1.75], **EXACT)


def test_inside_a_host_ports_belong_to_workers() -> None:
    plan = plan_of((1, 1, 1, 1), costs_s=[(1.0, 1.0)] * 4, size_bytes=500, cluster=TWO_HOSTS)
    found = run(plan, "gpipe", batches=1, accumulate=1)
    times = [starts(found, "forward", 0)[stage] for stage in range(4)]
    assert times == pytest.approx([0.0, 1.05, 2.8, 3.85], **EXACT)
    assert found.level_bytes == (4 * 500, 2 * 500)


def test_other_traffic_leaves_a_fraction_of_the_bandwidth() -> None:
    plan = plan_of((1, 1), size_bytes=500, cluster=Cluster.flat(2, 1000.0))
    quiet, busy = (run(plan, "gpipe", batches=1, accumulate=1, contention=left) for left in ({}, {0: 0.25}))
    assert starts(quiet, "forward", 0)[1] == pytest.approx(1.5, **EXACT)
    assert starts(busy, "forward", 0)[1] == pytest.approx(3.0, **EXACT)
    assert busy.link_bytes == quiet.link_bytes


def test_an_all_reduce_is_slowed_by_other_traffic_too() -> None:
    assert run(REDUCED, batches=80, contention={0: 0.5}).step_s == pytest.approx((1.0 + 12.0) / 4, **EXACT)


# --- Bytes and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_every_transfer_is_counted_there_and_back(schedule: str, ratio: float) -> None:
    plan = plan_of((2, 3, 1), skips=[(0, 2)], size_bytes=1000)
    found = run(plan, schedule, batches=12, activation_compression_ratio=ratio)
    wire_bytes = 1000 / ratio
    assert sum(found.link_bytes.values()) == 2 * 12 * 3 * wire_bytes
    assert found.level_bytes == (2 * 12 * 3 * wire_bytes,)
    assert found.link_bytes[0, 2] == 2 * wire_bytes  # mini-batches 0 and 6 meet there
    assert found.link_bytes[2, 0] == 2 * wire_bytes
    assert found.link_bytes[1, 5] == 6 * wire_bytes
    sizes = [event.size_bytes for event in found.events if event.kind == "send"]
    assert (len(sizes), set(sizes)) == (72, {wire_bytes})


def test_compression_shortens_messages() -> None:
    plan = plan_of((1, 1), size_bytes=4000, cluster=Cluster.flat(2, 1000.0))
    found = run(plan, "gpipe", batches=1, accumulate=1, activation_compression_ratio=4.0)
    assert starts(found, "forward", 0)[1] == pytest.approx(2.0, **EXACT)


def test_all_reduce_bytes_are_those_of_a_ring() -> None:
    assert run(REDUCED, batches=8).all_reduce_bytes == (2 * 4 * 6000,)  # two updates, four members, 2 * 3/4 * 4000


def test_peak_memory_by_hand() -> None:
    """Weights in versions, a gradient, the optimizer's state, and activations in flight."""
    plan = plan_of((1, 1, 1), parameter_bytes=1000, activation_bytes=70)
    adam = run(plan, batches=12).peak_memory_bytes
    assert adam == {0: 3000 + 1000 + 2000 + 210, 1: 2000 + 3000 + 140, 2: 1000 + 3000 + 70}
    momentum = run(plan, batches=12, optimizer_state_factor=1.0).peak_memory_bytes
    assert momentum == {rank: size - 1000 for rank, size in adam.items()}
    double = run(plan, "pipedream_2bw", batches=12, accumulate=4).peak_memory_bytes
    assert double == {0: 5000 + 210, 1: 5000 + 140, 2: 5000 + 70}
    gpipe = run(plan, "gpipe", batches=12, accumulate=4).peak_memory_bytes
    assert gpipe == dict.fromkeys(range(3), 4000 + 280)
    flushed = run(plan, "1f1b", batches=12, accumulate=4).peak_memory_bytes
    assert flushed == {0: 4000 + 210, 1: 4000 + 140, 2: 4000 + 70}


def test_staleness_by_stage() -> None:
    plan = plan_of((3, 1, 1))
    assert run(plan, batches=30, update="minibatch").max_staleness == (1, 1, 0)
    assert run(plan_of((1,) * 4), batches=30).max_staleness == (3, 2, 1, 0)
    assert run(plan, "pipedream_2bw", batches=30).max_staleness == (1, 1, 1)
    assert run(plan, "gpipe", batches=30).max_staleness == (0, 0, 0)


# --- Brute force ----------------------------------------------------------------------------------------------------

Times = dict[tuple[int, int], tuple[float, float]]
"""(rank, place in its program) -> (start, end)"""


def relaxed(plan: Plan, programs: Programs, slowdown: Mapping[int, float], *, overlap: bool) -> tuple[Times, bool]:
    """Start times by raising them until all constraints hold, as if ports never were busy; and whether they never are.

    Shares nothing with the simulator: no heap, no queues; a longest path over the actions.
    """
    programs_ = programs.by_rank
    place_of = {(rank, action): place for rank, program in programs_.items() for place, action in enumerate(program)}
    updates = {
        rank: [place for place, action in enumerate(program) if action.kind is Kind.UPDATE]
        for rank, program in programs_.items()
    }
    sizes = {(transfer.source, transfer.target): transfer.size_bytes for transfer in plan.transfers}
    lasts = {}  # by action: how long it takes by itself
    waits: dict[tuple[int, int], tuple[list[tuple[int, int]], float, float]] = {}  # for whom, then how long
    for rank, program in programs_.items():
        index = programs.stage_of[rank]
        stage = plan.stages[index]
        for place, action in enumerate(program):
            key = rank, place
            lasts[key] = 0.0
            if action.kind is Kind.FORWARD:
                lasts[key] = stage.forward_s * slowdown[rank]
            elif action.kind is Kind.BACKWARD:
                lasts[key] = stage.backward_s * slowdown[rank]
            elif action.kind is Kind.UPDATE:
                ordinal = updates[rank].index(place)
                members = [other for other in programs.stages[index] if len(updates[other]) > ordinal]
                begins = []
                for member in members:
                    at = updates[member][ordinal]
                    while overlap and programs_[member][at].kind is not Kind.BACKWARD:
                        at -= 1
                    begins.append((member, at))
                if len(members) > 1:
                    level = plan.cluster.link(*members)
                    latency_s = level.all_reduce_s(0, len(members))
                    reduce_s = level.all_reduce_s(stage.parameter_bytes, len(members)) - latency_s
                    waits[key] = begins, reduce_s, latency_s
            elif action.peer is not None and action.kind.value[0] == "R":
                sent = Kind.SEND_ACTIVATION if action.kind is Kind.RECEIVE_ACTIVATION else Kind.SEND_GRADIENT
                level = plan.cluster.link(rank, action.peer)
                first, second = sorted((index, programs.stage_of[action.peer]))
                origin = action.peer, place_of[action.peer, Action(sent, action.batch, rank)]
                waits[key] = [origin], sizes[first, second] / level.bandwidth, level.latency_s

    times: Times = dict.fromkeys(lasts, (0.0, 0.0))
    changed = True
    while changed:
        changed = False
        for rank, program in programs_.items():
            now = 0.0
            for place in range(len(program)):
                key = rank, place
                end = now + lasts[key]
                if key in waits:
                    origins, wire_s, latency_s = waits[key]
                    end = max(end, max(times[origin][0] for origin in origins) + wire_s + latency_s)
                    # A sum that goes along with backwards is not there before the last one's end.
                    backwards = [o for o in origins if programs_[o[0]][o[1]].kind is Kind.BACKWARD]
                    end = max([end, *(times[origin][1] for origin in backwards)])
                if times[key] != (now, end):
                    times[key] = now, end
                    changed = True
                now = end

    ports: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for (rank, place), (origins, wire_s, _) in waits.items():
        begin = max(times[origin][0] for origin in origins)
        updates_here = programs_[rank][place].kind is Kind.UPDATE
        span = begin, begin + wire_s
        ports["in", rank].append(span)
        ports["out", rank if updates_here else origins[0][0]].append(span)
    idle = all(
        first[1] <= second[0] and (first[0] < second[0] or first == second)
        for taken in ports.values()
        for first, second in pairwise(sorted(taken))
    )
    return times, idle


@st.composite
def costed_plans(draw: st.DrawFn) -> Plan:
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    pairs = [(source, target) for source in range(len(replicas)) for target in range(source + 2, len(replicas))]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    cost = st.floats(0.5, 4.0)
    latency_s = draw(st.sampled_from([0.0, 0.3]))
    return plan_of(
        replicas,
        skips=skips,
        costs_s=[(draw(cost), draw(cost)) for _ in replicas],
        size_bytes=draw(st.sampled_from([0, 10])),
        parameter_bytes=draw(st.sampled_from([0, 3])),
        cluster=Cluster.flat(sum(replicas), 1000.0, latency_s=latency_s),
        ranks=draw(st.permutations(range(sum(replicas)))),
    )


@settings(max_examples=150, deadline=None)
@given(costed_plans(), st.sampled_from(SCHEDULES), st.sampled_from(["minibatch", "round"]), st.booleans(), st.data())
def test_on_idle_ports_the_run_is_the_longest_path(
    plan: Plan, schedule: str, update: str, overlap: bool, data: st.DataObject
) -> None:
    batches = data.draw(st.integers(1, 14))
    slowdown = {rank: data.draw(st.floats(0.7, 2.0)) for rank in range(plan.ranks)}
    programs = build_programs(plan, schedule=schedule, batches=batches, update=update)  # type: ignore[arg-type]
    times, idle = relaxed(plan, programs, slowdown, overlap=overlap)
    assume(idle)
    found = simulate(plan, programs, options=SimulationOptions(slowdown=slowdown, overlap=overlap))
    assert found.makespan_s == pytest.approx(max(end for _, end in times.values()), **EXACT)
    computed = {
        (event.rank, event.kind, event.batch): (event.start_s, event.end_s)
        for event in found.events
        if event.kind in ("forward", "backward")
    }
    assert len(computed) == 2 * batches * len(plan.stages)
    for rank, program in programs.by_rank.items():
        for place, action in enumerate(program):
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                key = rank, action.kind.name.lower(), action.batch
                assert computed[key] == pytest.approx(times[rank, place], **EXACT), key


@settings(max_examples=60, deadline=None)
@given(costed_plans(), st.sampled_from(SCHEDULES), st.integers(1, 20))
def test_a_rank_does_one_thing_at_a_time_and_ports_keep_their_bandwidth(
    plan: Plan, schedule: str, batches: int
) -> None:
    """Through no port go more bytes between any two dates than it can take; no message is quicker than alone."""
    bandwidth = 20.0
    plan = replace(plan, cluster=Cluster.flat(plan.ranks, bandwidth))
    found = run(plan, schedule, batches)
    computed: dict[int, list[Event]] = defaultdict(list)
    ports: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in found.events:
        if event.kind == "send" and event.peer is not None:
            ports["out", event.rank].append(event)
            ports["in", event.peer].append(event)
            assert event.duration_s >= event.size_bytes / bandwidth - 1e-9
        elif event.kind == "all_reduce":
            assert event.duration_s >= event.size_bytes / bandwidth - 1e-9
        else:
            computed[event.rank].append(event)
    for events in computed.values():
        for first, second in pairwise(events):
            assert first.end_s <= second.start_s + 1e-12
    for events in ports.values():
        for first in events:
            for last in events:
                inside = [e for e in events if e.start_s >= first.start_s and e.end_s <= last.end_s]
                room = bandwidth * (last.end_s - first.start_s)
                assert not inside or sum(e.size_bytes for e in inside) <= room + 1e-6
    assert [event.start_s for event in found.events] == sorted(event.start_s for event in found.events)
    assert max(event.end_s for event in found.events) <= found.makespan_s + 1e-12
    assert found == run(plan, schedule, batches)


# --- Windows, refusals, baselines -----------------------------------------------------------------------------------


def test_a_run_too_short_for_a_steady_window_is_measured_as_a_whole() -> None:
    found = run(plan_of((1,) * 4), batches=3)
    assert found.step_s == pytest.approx(found.makespan_s / 3, **EXACT)
    assert found.window_s == (0.0, found.makespan_s)


def test_events_are_left_out_on_request_and_nothing_else_changes() -> None:
    plan = plan_of((2, 1), size_bytes=10, parameter_bytes=100, cluster=Cluster.flat(3, 1000.0))
    recorded, quiet = (run(plan, batches=20, record_events=record) for record in (True, False))
    assert len([event for event in recorded.events if event.kind == "forward"]) == 40
    assert quiet.events == ()
    assert replace(recorded, events=()) == quiet


def test_programs_of_another_plan_are_refused() -> None:
    programs = build_programs(plan_of((1, 1)), schedule="gpipe", batches=2)
    with pytest.raises(ScheduleError, match="programs are for a plan 1-1, the plan is 2; build them from this plan"):
        simulate(plan_of((2,)), programs)


def test_ranks_that_wait_for_ever_are_an_error_not_a_hang() -> None:
    plan = plan_of((1, 1))
    programs = build_programs(plan, schedule="gpipe", batches=1)
    stuck = replace(programs, by_rank=parse_programs("0: F0 RG0<1 SA0>1 B0 U0\n1: RA0<0 F0 B0 SG0>0 U0"))
    with pytest.raises(ScheduleError, match="2 ranks wait for ever, rank 0 at RG0<1"):
        simulate(plan, stuck)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"slowdown": {0: 0.0}}, "slowdown of rank 0 is 0.0"),
        ({"slowdown": {7: 2.0}}, "slowdown names rank 7, which plan 1-1 does not use"),
        ({"contention": {0: 1.5}}, "contention of level 0 is 1.5"),
        ({"contention": {1: 0.5}}, "contention names level 1, the cluster has 1"),
        ({"jitter": -0.1}, "jitter=-0.1"),
        ({"link_jitter": 11.0}, "link_jitter=11.0; give 0 to 10"),
        ({"update_s": float("nan")}, "update_s=nan"),
        ({"activation_compression_ratio": 0.0}, "activation_compression_ratio=0.0"),
    ],
)
def test_impossible_options_are_refused(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(plan_of((1, 1)), batches=2, **settings_)


def test_data_parallelism_and_a_single_device_are_simulated_alike() -> None:
    plan = plan_of(
        (2, 1), costs_s=[(1.0, 2.0), (0.5, 1.0)], parameter_bytes=3000, activation_bytes=10, ranks=(2, 1, 0),
        size_bytes=100, cluster=Cluster.flat(3, 1000.0),
    )  # fmt: skip
    parallel, single = data_parallel_plan(plan), single_device_plan(plan)
    assert (parallel.shape, parallel.stages[0].ranks, parallel.transfers) == ("3", (0, 1, 2), ())
    assert parallel.stages[0].parameter_bytes == 6000
    assert single.stages[0].ranks == (0,)
    assert single.stages[0].nodes == ("layer0", "layer1")
    assert simulate_data_parallel(plan).step_s == pytest.approx((1.5 + 2 * 2 / 3 * 6000 / 1000) / 3, **EXACT)
    assert simulate_single_device(plan).step_s == pytest.approx(4.5, **EXACT)
    slowed = SimulationOptions(slowdown={0: 2.0, 2: 5.0})
    assert simulate_single_device(plan, options=slowed).step_s == pytest.approx(9.0, **EXACT)
    assert simulate_data_parallel(plan, batches=30).batches == 30


@pytest.mark.parametrize("replicas", [(1,), (9,), (1,) * 6, (5, 2), (7, 1, 1), (2, 4, 1), (3, 7, 8), (40, 1)], ids=str)
def test_steady_batches_are_enough(replicas: tuple[int, ...]) -> None:
    """A run five times as long has the same pace, even where collectives of 3, 7 and 8 get into step slowly."""
    plan = plan_of(replicas, costs_s=[(0.9 + 0.1 * count, 2.0) for count in replicas])
    batches = steady_batches(plan)
    short, long = (run(plan, batches=count, update="minibatch") for count in (batches, 5 * batches))
    assert warmups(plan)[0] * plan.replicas[0] < batches / 2
    assert 0 < short.window_s[0] < short.window_s[1] < short.makespan_s
    assert short.step_s == pytest.approx(long.step_s, rel=0.02)


# --- Sweeps ---------------------------------------------------------------------------------------------------------

GRAPH = LayerGraph((LayerNode("a", "A", 1.0, 2.0, (0,), 0), LayerNode("b", "B", 0.25, 0.5, (0,), 9000)), (("a", "b"),))


def two_stages(graph: LayerGraph, *, cluster: Cluster) -> Plan:
    """A stand-in for the optimizer: the last layer on a quarter of the workers."""
    last = cluster.workers // 4
    replicas = (cluster.workers - last, last)
    costs_s = [(node.forward_s, node.backward_s) for node in graph.nodes]
    made = plan_of(replicas, costs_s=costs_s, cluster=cluster)
    stages = tuple(
        replace(stage, parameter_bytes=node.parameter_bytes)
        for stage, node in zip(made.stages, graph.nodes, strict=True)
    )
    return replace(made, stages=stages, predicted_step_s=0.5, data_parallel_step_s=2.0)


def test_a_sweep_predicts_and_simulates_every_cluster() -> None:
    heard: list[SweepPoint] = []
    points = sweep(GRAPH, partition=two_stages, workers=(4, 8), bandwidths=(1e3, 1e6), on_point=heard.append)
    assert points == heard
    assert [(point.bandwidth, point.workers, point.shape) for point in points] == [
        (1e3, 4, "3-1"),
        (1e3, 8, "6-2"),
        (1e6, 4, "3-1"),
        (1e6, 8, "6-2"),
    ]
    assert {point.predicted_speedup for point in points} == {4.0}
    alone, shared = points[0], points[1]
    assert alone.simulated_step_s == pytest.approx(1.0, rel=1e-9)
    data_parallel_s = (1.25 + 2 * 3 / 4 * 9000 / 1e3) / 4
    assert alone.simulated_speedup == pytest.approx(data_parallel_s / 1.0, rel=1e-9)
    assert shared.simulated_step_s == pytest.approx((0.25 + 2 * 1 / 2 * 9000 / 1e3) / 2, rel=1e-9)


def test_what_is_too_large_to_simulate_is_only_predicted() -> None:
    (point,) = sweep(GRAPH, partition=two_stages, workers=(64,), bandwidths=(1e6,), largest_actions=1000)
    assert point.predicted_speedup == 4.0
    assert point.simulated_step_s is None
    assert point.simulated_speedup is None
