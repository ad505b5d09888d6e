"""Schedules: pictures of the papers' figures, programs as text, weight versions, and a validator that finds faults."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_pipe.cluster import Cluster
from pl_pipe.errors import ScheduleError
from pl_pipe.partition import Plan, Stage, Transfer
from pl_pipe.schedule import (
    ORDERS,
    SCHEDULES,
    Action,
    Kind,
    Programs,
    build_programs,
    format_program,
    format_programs,
    least_accumulate,
    parse_action,
    parse_program,
    parse_programs,
    render,
    validate,
    warmups,
    weight_versions,
)
from pl_pipe.schedule import programs as programs_module

SHAPES = [
    (4,),
    (3, 1),
    (2, 1, 1),
    (2, 2),
    (1, 2, 1),
    (5, 6, 3, 1, 1),
    (15, 1),
    (1,) * 8,
    (1, 3),
    (1, 1, 4),
    (2, 3),
    (3, 2, 4),
]


def plan_of(
    replicas: Sequence[int],
    *,
    skips: Sequence[tuple[int, int]] = (),
    costs_s: Sequence[tuple[float, float]] | None = None,
    size_bytes: int = 0,
    parameter_bytes: int = 0,
    activation_bytes: int = 0,
    cluster: Cluster | None = None,
    ranks: Sequence[int] | None = None,
) -> Plan:
    """A plan with `replicas` by stage, each stage feeding the next one, and the `skips` besides."""
    numbers = iter(range(sum(replicas)) if ranks is None else ranks)
    costs = costs_s or [(1.0, 2.0)] * len(replicas)
    stages = tuple(
        Stage(
            nodes=(f"layer{index}",),
            modules=(),
            ranks=tuple(itertools.islice(numbers, count)),
            forward_s=forward_s,
            backward_s=backward_s,
            parameter_bytes=parameter_bytes,
            activation_bytes=activation_bytes,
        )
        for index, (count, (forward_s, backward_s)) in enumerate(zip(replicas, costs, strict=True))
    )
    pairs = sorted({(index, index + 1) for index in range(len(replicas) - 1)} | set(skips))
    return Plan(
        stages=stages,
        transfers=tuple(Transfer(source, target, size_bytes) for source, target in pairs),
        cluster=cluster or Cluster.flat(sum(replicas), 1e9),
        cost_model="test",
        predicted_step_s=1.0,
        data_parallel_step_s=1.0,
        uniform_step_s=None,
        single_device_step_s=1.0,
    )


def built(replicas: Sequence[int], schedule: str = "pipedream", batches: int = 8, **settings_: object) -> Programs:
    return build_programs(plan_of(replicas), schedule=schedule, batches=batches, **settings_)  # type: ignore[arg-type]


# --- Text -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_action_has_its_text() -> None:
    text = "RA3<0 F3 SA3>5 RG3<5 B3 SG3>0 U3"
    program = parse_program(text)
    assert [action.kind for action in program] == [
        Kind.RECEIVE_ACTIVATION,
        Kind.FORWARD,
        Kind.SEND_ACTIVATION,
        Kind.RECEIVE_GRADIENT,
        Kind.BACKWARD,
        Kind.SEND_GRADIENT,
        Kind.UPDATE,
    ]
    assert [action.peer for action in program] == [0, None, 5, 5, None, 0, None]
    assert {action.batch for action in program} == {3}
    assert format_program(program) == text


@given(st.sampled_from(list(Kind)), st.integers(0, 10**6), st.integers(0, 10**4))
def test_text_reads_back_as_the_action(kind: Kind, batch: int, peer: int) -> None:
    action = Action(kind, batch, None if kind.value in "FBU" else peer)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_read_back_from_text(schedule: str) -> None:
    programs = built((2, 3, 1), schedule, batches=13)
    text = format_programs(programs.by_rank)
    assert len(text.splitlines()) == 6
    assert parse_programs(text + "\n\n") == programs.by_rank


def test_a_rank_without_work_keeps_its_line() -> None:
    programs = built((3, 1), batches=2)
    assert programs.by_rank[2] == ()
    assert parse_programs(format_programs(programs.by_rank)) == programs.by_rank


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X3", "actions look like F3"),
        ("F", "actions look like F3"),
        ("F3 ", "actions look like F3"),
        ("F3>1", "forward is written F3"),
        ("SA3", "send_activation is written SA3>RANK"),
        ("SA3<1", "send_activation is written SA3>RANK"),
        ("RG3>1", "receive_gradient is written RG3<RANK"),
    ],
)
def test_bad_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("F0 B0", "names no rank"), ("1: F0\n1: B0", "rank 1 has two programs")])
def test_bad_lines_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        parse_programs(text)


# --- Pictures -------------------------------------------------------------------------------------------------------

PICTURES = {
    "pipedream": """
stage 0  rank 0 │ F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 .  B3 B3 .  B4 B4 .  B5 B5
stage 1  rank 1 │ .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .  B4 B4 .  B5 B5
stage 2  rank 2 │ .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 .  B5 B5
stage 3  rank 3 │ .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5
""",
    "1f1b": """
stage 0  rank 0 │ F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3 F4 F5 .  .  .  .  .  .  .  .  B4 B4 .  B5 B5
stage 1  rank 1 │ .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .  .  F4 F5 .  .  .  .  .  B4 B4 .  B5 B5
stage 2  rank 2 │ .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .  .  .  F4 F5 .  .  B4 B4 .  B5 B5
stage 3  rank 3 │ .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .  .  .  .  F4 B4 B4 F5 B5 B5
""",  # noqa: E501
    "gpipe": """
stage 0  rank 0 │ F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 F4 F5 .  .  .  .  .  .  .  .  .  B4 B4 B5 B5
stage 1  rank 1 │ .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  F4 F5 .  .  .  .  .  .  B4 B4 B5 B5
stage 2  rank 2 │ .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .  F4 F5 .  .  .  B4 B4 B5 B5
stage 3  rank 3 │ .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .  .  .  .  F4 F5 B4 B4 B5 B5
""",  # noqa: E501
}
PICTURES["pipedream_2bw"] = PICTURES["pipedream"]  # the same grid; only the updates are fewer


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_grid_of_four_stages(schedule: str) -> None:
    programs = built((1, 1, 1, 1), schedule, batches=6, accumulate=4)
    assert render(programs) == PICTURES[schedule].strip("\n")


def test_the_grid_of_three_replicas_and_one() -> None:
    """Replicas take turns, and wait for each other at their updates: F6 comes when B2 has ended."""
    picture = """
stage 0  rank 0 │ F0 F3 .  .  B0 B0 .  .  .  .  .  .  F6 B3 B3 .  .  .  .  .  .  .  B6 B6
stage 0  rank 1 │ F1 F4 .  .  .  .  .  B1 B1 .  .  .  F7 .  .  .  B4 B4 .  .  .  .  .  .  .  B7 B7
stage 0  rank 2 │ F2 F5 .  .  .  .  .  .  .  .  B2 B2 .  .  .  .  .  .  .  B5 B5
stage 1  rank 3 │ .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7
"""
    assert render(built((3, 1), update="minibatch")) == picture.strip("\n")


def test_the_grid_takes_other_durations_wide_numbers_and_a_limit() -> None:
    programs = built((1, 1), batches=11)
    assert render(programs, 2, 1, columns=10) == (
        "stage 0  rank 0 │ F0  F0  F1  F1  .   B0  F2  F2  B1  F3 …\n"
        "stage 1  rank 1 │ .   .   F0  F0  B0  F1  F1  B1  F2  F2 …"
    )
    short = built((1, 1), batches=2)
    assert render(short, columns=9) == (
        "stage 0  rank 0 │ F0 F1 .  .  B0 B0 .  B1 B1\n"
        "stage 1  rank 1 │ .  F0 B0 B0 F1 B1 B1"
    )  # fmt: skip


def test_a_picture_takes_whole_columns() -> None:
    with pytest.raises(ScheduleError, match="forward=0, backward=2"):
        render(built((1,)), forward=0)


# --- Programs -------------------------------------------------------------------------------------------------------


def test_two_stages_in_full() -> None:
    assert format_programs(built((1, 1), batches=3).by_rank).splitlines() == [
        "0: F0 SA0>1 F1 SA1>1 RG0<1 B0 U0 F2 SA2>1 RG1<1 B1 U1 RG2<1 B2 U2",
        "1: RA0<0 F0 B0 SG0>0 U0 RA1<0 F1 B1 SG1>0 U1 RA2<0 F2 B2 SG2>0 U2",
    ]


def test_a_skip_connection_adds_its_messages_and_ranks_may_have_any_number() -> None:
    plan = plan_of((1, 2, 1), skips=[(0, 2)], ranks=(3, 1, 2, 0))
    programs = build_programs(plan, schedule="gpipe", batches=2, accumulate=2)
    assert format_programs(programs.by_rank).splitlines() == [
        "3: F0 SA0>1 SA0>0 F1 SA1>2 SA1>0 RG0<1 RG0<0 B0 RG1<2 RG1<0 B1 U1",
        "1: RA0<3 F0 SA0>0 RG0<0 B0 SG0>3 U0",
        "2: RA1<3 F1 SA1>0 RG1<0 B1 SG1>3 U1",
        "0: RA0<3 RA0<1 F0 RA1<3 RA1<2 F1 B0 SG0>3 SG0>1 B1 SG1>3 SG1>2 U1",
    ]
    assert programs.stage_of == {3: 0, 1: 1, 2: 1, 0: 2}


def test_two_transfers_between_the_same_stages_are_one_message() -> None:
    plan = plan_of((1, 1))
    twice = replace(plan, transfers=(*plan.transfers, *plan.transfers))
    assert build_programs(twice, schedule="1f1b", batches=2) == build_programs(plan, schedule="1f1b", batches=2)


def updates_of(programs: Programs, rank: int) -> list[int]:
    return [action.batch for action in programs.by_rank[rank] if action.kind is Kind.UPDATE]


def test_when_updates_happen() -> None:
    per_batch = built((2, 1), batches=6, update="minibatch")
    assert [updates_of(per_batch, rank) for rank in range(3)] == [[0, 2, 4], [1, 3, 5], [0, 1, 2, 3, 4, 5]]
    per_round = built((2, 1), batches=6, update="round")
    assert [updates_of(per_round, rank) for rank in range(3)] == [[0, 2, 4], [1, 3, 5], [1, 3, 5]]
    uneven = built((2, 3), batches=12, update="round")
    assert [updates_of(uneven, rank) for rank in range(5)] == [[4, 10], [5, 11], [3, 9], [4, 10], [5, 11]]
    accumulated = built((2, 1), "pipedream_2bw", batches=9, accumulate=3)
    assert [updates_of(accumulated, rank) for rank in range(3)] == [[2, 4, 8], [1, 5, 7], [2, 5, 8]]


def test_the_last_update_may_have_fewer_members() -> None:
    programs = built((3, 1), batches=7, update="minibatch")
    assert programs.update_members[0] == [(0, 1, 2), (0, 1, 2), (0,)]
    assert validate(programs).updates == (3, 7)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_warm_up_is_the_published_rule(replicas: list[int]) -> None:
    ranks = sum(replicas)
    published = [(ranks - 1 - sum(replicas[:stage])) // replicas[stage] for stage in range(len(replicas))]
    assert list(warmups(plan_of(replicas))) == published
    doubled = list(warmups(plan_of(replicas), 1.0))
    assert all(deep >= plain for deep, plain in zip(doubled, published, strict=True))
    assert doubled[-1] == published[-1], "nothing follows the last stage"


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"schedule": "pipe"}, "schedule=pipe is unknown; choose one of pipedream, pipedream_2bw, 1f1b, gpipe"),
        ({"batches": 0}, "batches=0"),
        ({"deeper": -1.0}, "deeper=-1.0; give 0"),
        ({"schedule": "gpipe", "accumulate": 0}, "accumulate=0"),
        ({"update": "epoch"}, "update=epoch is unknown; choose minibatch or round"),
        ({"schedule": "1f1b", "accumulate": 2}, "accumulate=2, but 3-1 has a stage with 3 replicas.*accumulate=3"),
    ],
)
def test_impossible_settings_are_refused(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        built((3, 1), **settings_)  # type: ignore[arg-type]


# --- The validator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["minibatch", "round"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("replicas", SHAPES, ids=str)
def test_no_schedule_deadlocks(replicas: tuple[int, ...], schedule: str, update: str) -> None:
    depth = len(replicas)
    skips = [(source, target) for source in range(depth) for target in range(source + 2, depth, 2)]
    for plan in (plan_of(replicas), plan_of(replicas, skips=skips)):
        for batches in (1, 2, plan.ranks, plan.ranks + 1, 3 * plan.ranks + 2):
            programs = build_programs(plan, schedule=schedule, batches=batches, update=update)  # type: ignore[arg-type]
            report = validate(programs)
            assert report.messages == 2 * batches * len(plan.transfers)
            assert report.actions == programs.actions
            assert all(report.max_in_flight[rank] <= programs.in_flight[rank] for rank in programs.by_rank)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    replicas = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    pairs = [(source, target) for source in range(len(replicas)) for target in range(source + 1, len(replicas))]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    ranks = draw(st.permutations(range(sum(replicas))))
    return plan_of(replicas, skips=skips, ranks=ranks)


@settings(max_examples=150, deadline=None)
@given(plans(), st.sampled_from(SCHEDULES), st.integers(1, 60), st.sampled_from(["minibatch", "round"]), st.data())
def test_random_plans_never_deadlock(plan: Plan, schedule: str, batches: int, update: str, data: st.DataObject) -> None:
    deeper = data.draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.7]))
    least = least_accumulate(plan, schedule, deeper)
    accumulate = data.draw(st.none() | st.integers(least, least + 30))
    programs = build_programs(
        plan, schedule=schedule, batches=batches, accumulate=accumulate, update=update, deeper=deeper  # type: ignore[arg-type]
    )  # fmt: skip
    report = validate(programs)
    assert report.messages == 2 * batches * len(plan.transfers)
    if schedule == "pipedream_2bw":
        assert max(report.weight_versions.values()) <= 2
        assert max(report.max_staleness) <= 1
    if programs.flushes:
        assert set(report.weight_versions.values()) == {1}
        assert set(report.max_staleness) == {0}


def altered(programs: Programs, old: str, new: str) -> Programs:
    """`programs` with a piece of their text exchanged."""
    text = format_programs(programs.by_rank)
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in\n{text}"
    return replace(programs, by_rank=parse_programs(text.replace(old, new)))


# 0: F0 SA0>1 F1 SA1>1 RG0<1 B0 U0 F2 SA2>1 RG1<1 B1 U1 RG2<1 B2 U2
# 1: RA0<0 F0 B0 SG0>0 U0 RA1<0 F1 B1 SG1>0 U1 RA2<0 F2 B2 SG2>0 U2
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("F0 SA0>1", "SA0>1 F0", "rank 0 runs SA0>1 before F0; it belongs behind"),
        ("RA0<0 F0", "F0 RA0<0", "rank 1 runs RA0<0 behind F0; it belongs before"),
        ("RG0<1 B0", "B0 RG0<1", "rank 0 runs RG0<1 behind B0; it belongs before"),
        ("B0 SG0>0", "SG0>0 B0", "rank 1 runs SG0>0 before B0; it belongs behind"),
        ("RA1<0 F1 B1", "B1 RA1<0 F1", "rank 1 runs B1 before F1; it belongs behind"),
        ("SG0>0 U0", "SG0>0 B0 U0", "rank 1 runs B0 behind SG0; it belongs before"),
        ("RA0<0 F0", "RA0<0 F0 F0", "rank 1 runs F0 twice"),
        ("RG0<1 B0 U0", "U0 RG0<1 B0", "rank 0 runs U0 before B0; it belongs behind"),
        ("B0 U0 F2", "B0 F2", "rank 0 gathers mini-batches 0, 1 in U1, but 1 "),
        ("RG2<1 B2 U2", "RG2<1 B2", "rank 0 never applies the gradient of B2; end with U2"),
        ("RG2<1 B2 U2", "RG2<1", "rank 0 never runs B2"),
        ("F1 SA1>1", "F1", "rank 1 runs RA1<0, but rank 0 never sends it"),
        ("RA1<0 F1", "F1", "rank 0 runs SA1>1, but rank 1 never receives it"),
        ("SA1>1 RG0", "SA1>1 SA1>1 RG0", "rank 0 runs SA1>1 twice"),
        ("RA1<0 F1 B1 SG1>0 U1", "", "rank 1 lacks F1"),
        ("RG0<1 B0 U0 F2 SA2>1", "F2 SA2>1 RG0<1 B0 U0", "rank 0 has 3 mini-batches in flight at F2.* bound is 2"),
    ],
)
def test_faults_are_found(old: str, new: str, words: str) -> None:
    programs = built((1, 1), batches=3)
    validate(programs)
    with pytest.raises(ScheduleError, match=words):
        validate(altered(programs, old, new))


def test_a_mini_batch_belongs_to_the_replica_whose_turn_it_is() -> None:
    programs = built((2,), batches=2)
    swapped = replace(programs, by_rank=parse_programs("0: F1 B1 U1\n1: F0 B0 U0"))
    with pytest.raises(ScheduleError, match="rank 0 lacks F0; replica 0 of 2 of stage 0"):
        validate(swapped)


def test_an_update_gathers_one_group_only() -> None:
    programs = built((1,), "gpipe", batches=4, accumulate=2)
    split = replace(programs, by_rank=parse_programs("0: F0 B0 U0 F1 B1 U1 F2 F3 B2 B3 U3"))
    with pytest.raises(ScheduleError, match="rank 0 applies mini-batches of one update in several"):
        validate(split)


def test_ranks_that_wait_for_ever_are_named() -> None:
    """Rank 0 wants the gradient of 0 before it lets go of activation 1, which rank 1 wants first."""
    programs = built((1, 1), "gpipe", batches=2, accumulate=2)
    text = """
        0: F0 SA0>1 RG0<1 F1 SA1>1 B0 RG1<1 B1 U1
        1: RA0<0 F0 RA1<0 F1 B0 SG0>0 B1 SG1>0 U1"""
    with pytest.raises(ScheduleError) as caught:
        validate(replace(programs, by_rank=parse_programs(text)))
    assert "2 of 2 ranks wait for ever" in str(caught.value)
    assert "rank 0 at RG0<1 waits for SG0>0 of rank 1" in str(caught.value)
    assert "rank 1 at RA1<0 waits for SA1>1 of rank 0" in str(caught.value)


def test_replicas_that_wait_in_an_update_are_named() -> None:
    """Rank 2 wants mini-batch 2 before it answers 1; rank 0 sends 2 only behind the update it shares with rank 1."""
    programs = replace(built((2, 1), batches=4, update="minibatch"), in_flight={0: 2, 1: 2, 2: 2})
    text = """
        0: F0 SA0>2 RG0<2 B0 U0 F2 SA2>2 RG2<2 B2 U2
        1: F1 SA1>2 F3 SA3>2 RG1<2 B1 U1 RG3<2 B3 U3
        2: RA0<0 F0 B0 SG0>0 U0 RA2<0 F2 RA1<1 F1 B1 SG1>1 U1 B2 SG2>0 U2 RA3<1 F3 B3 SG3>1 U3"""
    with pytest.raises(ScheduleError) as caught:
        validate(replace(programs, by_rank=parse_programs(text)))
    assert "3 of 3 ranks wait for ever" in str(caught.value)
    assert "rank 0 at U0 waits for the update of rank 1;" in str(caught.value)
    assert "rank 1 at RG1<2 waits for SG1>1 of rank 2;" in str(caught.value)
    assert "rank 2 at RA2<0 waits for SA2>2 of rank 0;" in str(caught.value)


def test_less_warm_up_than_the_rule_starves_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing warm-ups deadlock: a stage would wait for more forwards than the stage before lets out."""
    monkeypatch.setattr(programs_module, "warmups", lambda plan, deeper: (0, 1))
    with pytest.raises(ScheduleError, match="2 of 2 ranks wait for ever: rank 0 at RG0<1 waits for SG0>0 of rank 1"):
        validate(built((1, 1), batches=3))


# --- Weight versions ------------------------------------------------------------------------------------------------


def test_pipedream_keeps_a_version_for_each_mini_batch_in_flight() -> None:
    versions = weight_versions(built((1, 1, 1, 1), batches=9))
    assert [versions[rank].kept for rank in range(4)] == [4, 3, 2, 1]
    for rank, warmup in enumerate((3, 2, 1, 0)):
        seen = [backward.version for backward in versions[rank].backwards]
        assert seen == [max(batch - warmup, 0) for batch in range(9)]
        assert [backward.staleness for backward in versions[rank].backwards] == [
            min(batch, warmup) for batch in range(9)
        ]


def test_updates_once_a_round_need_fewer_versions() -> None:
    per_batch, per_round = (
        weight_versions(built((1, 4), batches=24, update=update)) for update in ("minibatch", "round")
    )
    assert per_batch[0].kept == 5
    assert per_round[0].kept == 2  # five in flight lie in two rounds of four
    assert per_round[0].max_staleness == 1


def test_2bw_is_one_update_late_on_every_stage() -> None:
    """W(t+1) = W(t) - v·∇f(W(t-1)): the gradient of group t is that of version t - 1, and makes version t + 1."""
    for rank, found in weight_versions(built((1, 1, 1), "pipedream_2bw", batches=20, accumulate=4)).items():
        assert found.kept == 2, rank
        for backward in found.backwards:
            group = backward.batch // 4
            assert backward.version == max(group - 1, 0)
            assert backward.staleness == min(group, 1)


@pytest.mark.parametrize("replicas", [shape for shape in SHAPES if len(shape) > 1], ids=str)
def test_2bw_refuses_what_two_versions_cannot_hold(replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(replicas)
    least = least_accumulate(plan, "pipedream_2bw")
    enough = build_programs(plan, schedule="pipedream_2bw", batches=6 * least, accumulate=least)
    assert max(validate(enough).weight_versions.values()) == 2
    if least == 1:
        return
    with pytest.raises(ScheduleError, match=rf"accumulate={least - 1}, but .* set accumulate={least} or more"):
        build_programs(plan, schedule="pipedream_2bw", batches=6 * least, accumulate=least - 1)
    if least > max(replicas):  # the bound is tight: one less, and a forward comes before its version
        monkeypatch.setattr(programs_module, "least_accumulate", lambda plan, schedule, deeper: 1)
        short = build_programs(plan, schedule="pipedream_2bw", batches=6 * least, accumulate=least - 1)
        with pytest.raises(ScheduleError, match="does not exist yet"):
            validate(short)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_vertical_sync_reads_one_version_on_all_stages(stages: int) -> None:
    """The version that the first stage has when the mini-batch enters (PipeDream, SOSP'19, section 3.3)."""
    programs = built((1,) * stages, batches=12, vertical_sync=True)
    for found in weight_versions(programs).values():
        assert [backward.version for backward in found.backwards] == [max(0, k - (stages - 1)) for k in range(12)]
        assert found.kept == stages
    with pytest.raises(ScheduleError, match="vertical_sync=true, but schedule=1f1b"):
        built((1, 1), "1f1b", vertical_sync=True)


# --- As mini-batches arrive -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(0, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_an_order_may_go_on_after_its_end(schedule: str, warmup: int, groups: int, segments: list[int]) -> None:
    """Runs of unknown length, one after another on the same object, are what each would be alone."""
    every = max(groups, warmup, 1)
    order = ORDERS[schedule](warmup, every, 1)
    for batches in segments:
        done = [action for batch in range(batches) for action in order.arrive(batch)]
        assert [action.batch for action in done if action.kind is Kind.FORWARD] == list(range(batches))
        done += order.finish()
        assert [action.batch for action in done if action.kind is Kind.BACKWARD] == list(range(batches))
        updates = [action.batch for action in done if action.kind is Kind.UPDATE]
        assert updates == [min(first + every, batches) - 1 for first in range(0, batches, every)]
        alone = ORDERS[schedule](warmup, every, 1)
        again = [action for batch in range(batches) for action in alone.arrive(batch)]
        assert done == [*again, *alone.finish()]
