"""Recorded pipelines: the events of real ranks against the schedule's own programs, and predictions against the
simulator's events given out as measured ones."""

import itertools
import json
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from pipedream_farm import Farm, Order

from pl_pipe.callbacks import PipelineTimeline
from pl_pipe.comm.common_clock import CommonClock, Reading
from pl_pipe.comm.listening import SendWatch
from pl_pipe.errors import ConfigError, RunError
from pl_pipe.events import Event
from pl_pipe.report.comparison import draw_comparison, summary, write_comparison
from pl_pipe.report.measured_run import MeasuredRun, read_run, write_run
from pl_pipe.report.overlap import overlap
from pl_pipe.report.timeline import FRAME_IN, PANEL_IN, ROW_IN, WIDTH_IN
from pl_pipe.schedule import build_programs
from pl_pipe.schedule.actions import COMPUTES
from pl_pipe.simulate import simulate
from tests.test_schedule import plan_of

pytest_plugins = "pipedream_plugin"

BATCHES, EPOCH, DPI = 10, 5, 110
KINDS = {"F": "forward", "B": "backward", "U": "update"}


def order(ranks: int, schedule: str = "pipedream", **options: Any) -> Order:
    given = {"validation": False, "differ": "clocks", "timeline": {}, **options}
    return Order(ranks=ranks, split=True, strategy={"schedule": schedule}, **given)


RUNS = [order(2), order(3, validation=True), order(2, "1f1b"), order(2, "gpipe"), order(3, "pipedream_2bw")]
NAMES = [f"{run.ranks}-{run.options['strategy']['schedule']}" for run in RUNS]
recorded = pytest.mark.parametrize("run", RUNS, ids=NAMES)


def recorded_by(farm: Farm, run: Order) -> MeasuredRun:
    job = farm.start(run)
    assert job.outcome
    return read_run(job.folder / "timeline" / "timeline.json")


def by_rank(run: MeasuredRun, *kinds: str) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in run.events:
        if event.kind in kinds:
            found[event.rank].append(event)
    return found


# --- Real ranks -----------------------------------------------------------------------------------------------------


@recorded
def test_each_rank_did_what_its_program_says(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    assert found.plan is not None
    assert found.first == 0
    assert found.drained
    bounds = [*found.segments, found.end]
    expected: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for start, end in itertools.pairwise(bounds):
        every = None if found.schedule == "pipedream" else found.update_every
        programs = build_programs(found.plan, schedule=found.schedule, batches=end - start, accumulate=every)
        for rank, program in programs.by_rank.items():
            expected[rank] += [(KINDS[a.kind.value], start + a.batch) for a in program if a.kind in COMPUTES]
    measured = by_rank(found, *KINDS.values())
    assert sorted(measured) == list(range(run.ranks))
    for rank, events in measured.items():
        did, wanted = [(event.kind, event.batch) for event in events], expected[rank]
        if found.schedule == "pipedream_2bw":  # Lightning lets a rank update when the forwards of its batch are done
            did, wanted = (sorted(actions, key=lambda action: action[0] == "update") for actions in (did, wanted))
        assert did == wanted


@recorded
def test_every_mini_batch_goes_forward_and_backward_once_on_each_stage(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    mini_batches = BATCHES if found.schedule == "pipedream" else found.end
    assert found.end == mini_batches
    counts = Counter((event.kind, event.stage, event.batch) for event in found.events if event.kind in KINDS.values())
    for kind in ("forward", "backward"):
        for stage, batch in itertools.product(range(run.ranks), range(found.end)):
            assert counts[kind, stage, batch] == 1
    ends = {(event.stage, event.batch): event.end_s for event in found.events if event.kind == "forward"}
    for event in found.events:
        if event.kind == "backward":
            assert event.start_s >= ends[event.stage, event.batch]


@recorded
def test_a_rank_does_one_thing_at_a_time_and_waits_within_it(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    for events in by_rank(found, *KINDS.values()).values():
        for before, after in itertools.pairwise(events):
            assert before.end_s <= after.start_s
    computed = by_rank(found, "forward", "backward")
    for rank, waits in by_rank(found, "receive").items():
        for wait in waits:
            assert any(
                event.start_s <= wait.start_s and wait.end_s <= event.end_s and event.batch == wait.batch
                for event in computed[rank]
            )


@recorded
def test_the_clocks_of_all_ranks_agree(farm: Farm, run: Order) -> None:
    """They are a thousand seconds apart; still nothing is received before it was sent."""
    found = recorded_by(farm, run)
    assert 0 < found.clock_error_s < 0.5
    sends, receives = (by_route(found, kind) for kind in ("send", "receive"))
    assert set(sends) == set(receives)
    assert {route[:2] for route in sends} >= {(run.ranks - 1, run.ranks - 2), (run.ranks - 2, run.ranks - 1)}
    for route, sent in sends.items():
        assert len(sent) == len(receives[route])
        for before, after in zip(sent, receives[route], strict=True):
            assert before.size_bytes == after.size_bytes > 0
            assert before.end_s >= before.start_s
            assert after.end_s >= before.start_s - 2 * found.clock_error_s


def by_route(run: MeasuredRun, kind: str) -> dict[tuple[int, int, int], list[Event]]:
    """Messages by sender, receiver and mini-batch."""
    found: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in run.events:
        if event.kind == kind:
            assert event.peer is not None
            source, target = (event.rank, event.peer) if kind == "send" else (event.peer, event.rank)
            found[source, target, event.batch].append(event)
    return found


@pytest.mark.parametrize("pair", [(order(2), order(2, timeline=None))])
def test_recording_changes_nothing(farm: Farm, pair: tuple[Order, Order]) -> None:
    heard, unheard = (farm.start(run).outcome[0] for run in pair)
    assert heard["listened"] == [True] * BATCHES
    assert unheard["listened"] == [False] * BATCHES
    assert heard["losses"] == unheard["losses"]
    for name, value in unheard["weights"].items():
        assert torch.equal(value, heard["weights"][name]), name


@pytest.mark.parametrize("run", [order(2, timeline={"skip": 2, "batches": 5})])
def test_only_the_chosen_batches_are_recorded(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    assert (found.first, found.end, found.drained) == (2, 7, False)
    assert found.segments == (0, EPOCH)
    batches = Counter(event.batch for event in found.events if event.kind == "backward")
    assert batches == dict.fromkeys(range(2, 7), 2)
    assert {event.batch for event in found.events} == set(range(2, 7))
    assert min(event.start_s for event in found.events) == 0
    for result in farm.start(run).outcome:
        assert result["listened"][:2] == [False] * 2
        assert result["listened"][2:7] == [True] * 5
        assert not result["listened"][-1], "nobody listens when all that was asked for is there"


@pytest.mark.parametrize("run", [order(1)])
def test_one_rank_has_a_timeline_too(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    assert found.plan is None
    actions = [(event.kind, event.batch) for event in found.events]
    assert actions == [(kind, batch) for batch in range(BATCHES) for kind in KINDS.values()]
    assert summary(found).endswith("a mini-batch measured, over mini-batches 8 to 9")


@pytest.mark.parametrize("run", [order(2, timeline={"skip": 10}), order(2, timeline={"folder": "rank0.log"})])
def test_nothing_to_record_and_nowhere_to_write(farm: Farm, run: Order) -> None:
    job = farm.start(run)
    if "skip" in run.options["timeline"]:
        assert job.outcome
        assert not list((job.folder / "timeline").iterdir())
        assert "skip=10, and 10 batches came" in (job.folder / "rank0.log").read_text()
    else:
        for error in job.errors:
            assert error.startswith("ConfigError: PipelineTimeline cannot write into folder=rank0.log")
        assert job.seconds < 100


@pytest.mark.parametrize("run", [order(2), order(2).over(2, split=False, data={"samples": 80})])
def test_the_prediction_needs_a_plan_with_times(farm: Farm, run: Order) -> None:
    found = recorded_by(farm, run)
    folder = farm.start(run).folder
    log = (folder / "rank0.log").read_text()
    pid_count = len(
        {entry["pid"] for entry in json.loads((folder / "timeline" / "trace.json").read_text())["traceEvents"]}
    )
    if run.options["split"]:
        assert found.predicted == ()
        assert pid_count == 2
        assert "no times to predict from" in summary(found) or "too few" in summary(found)
    else:
        assert {event.batch for event in found.predicted} == set(range(found.end))
        assert pid_count == 4
        assert " predicted (" in summary(found)
    assert summary(found) in log
    rows = 2 if run.options["split"] else 4
    height = FRAME_IN + ROW_IN * rows + (0 if run.options["split"] else PANEL_IN)
    assert png_size(folder / "timeline" / "timeline.png") == (WIDTH_IN * DPI, int(height * DPI))


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])  # type: ignore[return-value]


# --- Without ranks --------------------------------------------------------------------------------------------------


def simulated(schedule: str = "pipedream", batches: int = 40, every: int = 4) -> MeasuredRun:
    """A prediction given out as a measured run."""
    plan = plan_of((1, 1, 1), costs_s=[(0.01, 0.02), (0.02, 0.04), (0.01, 0.03)], size_bytes=1000, ranks=(2, 1, 0))
    accumulate = None if schedule == "pipedream" else every
    programs = build_programs(plan, schedule=schedule, batches=batches, accumulate=accumulate)
    return MeasuredRun(
        schedule=schedule,
        update_every=1 if schedule == "pipedream" else every,
        first=0,
        end=batches,
        drained=True,
        segments=(0,),
        clock_error_s=1e-5,
        plan=plan,
        events=simulate(plan, programs).events,
    )


def dates(events: Sequence[Event]) -> list[tuple[int, str, int, float, float]]:
    found = [(e.rank, e.kind, e.batch, round(e.start_s, 6), round(e.end_s, 6)) for e in events]
    return sorted(found)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw", "1f1b", "gpipe"])
def test_the_prediction_of_a_simulated_run_is_that_run(schedule: str) -> None:
    run = simulated(schedule)
    assert dates(run.predicted) == dates(run.events)
    pace = run.pace
    assert pace is not None
    assert pace.measured_s == pytest.approx(pace.predicted_s)
    assert run.plan is not None
    every = None if schedule == "pipedream" else run.update_every
    longer = build_programs(run.plan, schedule=schedule, batches=200, accumulate=every)
    assert pace.predicted_s == pytest.approx(simulate(run.plan, longer).step_s, rel=0.01)
    assert "(1.00 times that)" in summary(run)


def test_each_stretch_is_laid_where_it_began() -> None:
    once = simulated(batches=12)
    again = [replace(e, batch=e.batch + 12, start_s=e.start_s + 5.0, end_s=e.end_s + 5.0) for e in once.events]
    run = replace(once, end=24, segments=(0, 12), events=(*once.events, *again))
    assert dates(run.predicted) == dates(run.events)


@pytest.mark.parametrize("first", [0, 5, 25])
def test_part_of_a_run_is_predicted_from_a_pipeline_that_was_full_before(first: int) -> None:
    whole = simulated(batches=60)
    part = [event for event in whole.events if first <= event.batch < 40]
    run = replace(whole, first=first, end=40, drained=False, events=tuple(part))
    assert dates(run.predicted) == dates(run.events)


def test_a_run_that_is_slower_than_predicted_says_how_much() -> None:
    run = simulated()
    slower = replace(run, events=tuple(replace(e, start_s=e.start_s * 1.5, end_s=e.end_s * 1.5) for e in run.events))
    assert "90 ms a mini-batch measured, 60 ms predicted (1.50 times that)" in summary(slower)
    assert "too few to have a steady pace" in summary(replace(run, end=3, events=run.events[:9]))


def test_messages_are_hidden_where_their_ranks_compute() -> None:
    """Two ranks, three mini-batches of one second: of each message half a second is behind something on its sender,
    and what its receiver does not wait for."""

    def event(rank: int, kind: str, start_s: float, end_s: float, batch: int, peer: int | None = None) -> Event:
        return Event(rank, kind, start_s, end_s, batch, 1 - rank, peer)

    events: list[Event] = []
    for batch in range(6):
        at = float(batch)
        events += [
            event(1, "forward", at, at + 0.5, batch),
            event(1, "send", at + 0.25, at + 0.75, batch, peer=0),
            event(0, "forward", at + 0.5, at + 0.9, batch),
            event(0, "receive", at + 0.5, at + 0.7, batch, peer=1),
            event(0, "backward", at + 0.9, at + 1.0, batch),
        ]
    run = replace(simulated(), schedule="1f1b", update_every=1, end=6, plan=None, events=tuple(events))
    found = overlap(run)
    assert run.pace is not None
    steps = run.pace.last - run.pace.first
    assert found is not None
    assert found.under_way_s == pytest.approx(steps * (0.5 + 0.5))
    assert found.hidden_s == pytest.approx(steps * (0.25 + 0.05))
    assert "ranks computed during 30% of the time" in summary(run)
    assert overlap(replace(run, end=1, events=run.events[:5])) is None


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = simulated()
    events = tuple(replace(e, start_s=round(e.start_s, 9), end_s=round(e.end_s, 9)) for e in run.events)
    run = replace(run, first=1, drained=False, segments=(0, 7), events=events)
    write_run(run, tmp_path / "timeline.json")
    assert read_run(tmp_path / "timeline.json") == run
    alone = replace(run, plan=None)
    write_run(alone, tmp_path / "alone.json")
    assert read_run(tmp_path / "alone.json") == alone
    assert alone.predicted == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "is not a timeline of schema 1 (schema: 9)"),
        ({"events": [[1, 2]]}, "cannot be read as a timeline"),
        ({"plan": {"schema": 1}}, "cannot be used"),
        ({"first": None}, "cannot be read as a timeline"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({**simulated().as_json(), **change}))
    with pytest.raises(RunError) as caught:
        read_run(path)
    assert message in str(caught.value)
    with pytest.raises(RunError, match="cannot be read"):
        read_run(tmp_path / "missing.json")


def test_the_picture_has_both_runs_on_one_scale(tmp_path: Path) -> None:
    run = simulated()
    draw_comparison(run, tmp_path / "both.png")
    draw_comparison(replace(run, plan=None), tmp_path / "alone.png")
    wide, tall = png_size(tmp_path / "both.png")
    assert (wide, tall) == (WIDTH_IN * DPI, int((FRAME_IN + PANEL_IN + 6 * ROW_IN) * DPI))
    assert png_size(tmp_path / "alone.png") == (WIDTH_IN * DPI, int((FRAME_IN + 3 * ROW_IN) * DPI))


def test_predicted_ranks_are_processes_of_their_own_in_the_trace(tmp_path: Path) -> None:
    run = simulated(batches=4)
    waited = replace(run, events=(*run.events, Event(0, "receive", 0.5, 0.6, 3, 2, 1, 1000)))
    write_comparison(waited, tmp_path)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {
        0: "stage 2 rank 0",
        1: "stage 1 rank 1",
        2: "stage 0 rank 2",
        3: "predicted stage 2 rank 0",
        4: "predicted stage 1 rank 1",
        5: "predicted stage 0 rank 2",
    }
    wait = next(entry for entry in entries if entry["name"] == "RA3<1")
    assert (wait["pid"], wait["tid"], wait["args"]["bytes"]) == (0, 0, 1000)
    assert {file.name for file in tmp_path.iterdir()} == {"timeline.json", "timeline.png", "trace.json"}


def test_a_clock_that_goes_too_fast_is_translated_between_two_readings() -> None:
    clock = CommonClock(Reading(1100.0, 100.0, 2e-4), Reading(1210.0, 110.0, 1e-4))
    assert clock.common_s(1100.0) == pytest.approx(1000.0)
    assert clock.common_s(1155.0) == pytest.approx(1050.0)
    assert clock.common_s(1210.0) == pytest.approx(1100.0)
    assert clock.error_s == pytest.approx(1e-4)


class FakeWork:
    def __init__(self, error: Exception | None = None) -> None:
        self.may_leave, self.error = threading.Event(), error

    def wait(self, timeout: timedelta) -> None:
        assert timeout > timedelta(days=1), "gloo would close the group"
        assert self.may_leave.wait(20)
        if self.error is not None:
            raise self.error


def test_a_watched_send_is_over_when_it_has_left_and_keeps_its_error() -> None:
    watch, left = SendWatch(), []
    first, second = FakeWork(), FakeWork(RuntimeError("connection closed"))
    sent = watch.watch(first, left.append)
    lost = watch.watch(second, left.append)
    assert not sent.is_completed()
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.01 s"):
        sent.wait(timedelta(seconds=0.01))
    first.may_leave.set()
    sent.wait(timedelta(seconds=20))
    assert sent.is_completed()
    second.may_leave.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        lost.wait(timedelta(seconds=20))
    watch.close(timeout_s=20)
    assert len(left) == 1


@pytest.mark.parametrize(("settings", "named"), [({"batches": 0}, "batches=0"), ({"skip": -1}, "skip=-1")])
def test_impossible_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PipelineTimeline(**settings)


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=[PipelineTimeline(tmp_path)], logger=False, fast_dev_run=True,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"strategy is SingleDeviceStrategy; set strategy=pipedream"):
        trainer.fit(BoringModel())
