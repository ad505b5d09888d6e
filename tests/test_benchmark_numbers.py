"""What benchmarks of uneven workers and of adaptation compute from their rows: known rows in, known numbers out."""

import csv
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
FOLDER = Path(__file__).parents[1] / "benchmarks"
NAN = math.nan
ALARM = (
    "14:02:11 step 8: 3 of 4 ranks say that their links are slow; trials: star 90.1 ms, clique 30.2 ms; star -> clique"
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of benchmarks have modules of the same name: what a test imports of them is forgotten after it."""
    before = set(sys.modules)
    for name in ("pipedream", "hetero", "adapt"):
        monkeypatch.syspath_prepend(str(FOLDER / name))
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]


def run(rule: str, speed: float, reached: float = 5.0, *, repeat: int = 0, kind: str = "slow", **more: Any) -> Any:
    from uneven_results import Run

    return Run(kind, rule, repeat, 40.0, 0.93, speed, reached, 0.94, 4, "2026-11-16", "2 cores", "idle", **more)


def of_steps(*rates: float, traffic: range = range(0), **events: str) -> list[dict[str, Any]]:
    """`_3="alarm: …"` is an event after step 3."""
    return [
        {"step": step, "samples_per_s": rate, "traffic": int(step in traffic), "event": events.get(f"_{step}", "")}
        for step, rate in enumerate(rates)
    ]


@pytest.mark.parametrize("times", [(NAN, 4.0, 6.0), (4.0, NAN, 6.0), (4.0, 6.0, NAN)])
def test_a_run_that_never_got_there_is_later_than_all_whatever_its_place(times: tuple[float, ...]) -> None:
    from uneven_results import Spread

    assert Spread.of(times) == Spread(median=6.0, least=4.0, most=math.inf, finite=2, count=3)
    assert math.isinf(Spread.of([NAN, 4.0, NAN]).median)


def test_the_first_epoch_does_not_count_where_there_are_more() -> None:
    from uneven_results import settled_rate

    assert settled_rate([10.0, 12.0, 14.0], [100, 200, 300], left_out=1) == 50.0
    assert settled_rate([10.0], [100], left_out=0) == 10.0


def test_rules_are_compared_repeat_by_repeat_and_not_with_other_settings() -> None:
    from uneven_results import advantages, by_setting, goals

    rows = [
        *(run("allreduce", speed, 10.0, repeat=repeat) for repeat, speed in enumerate((100.0, 200.0, 400.0))),
        *(run("partial_reduce", speed, NAN, repeat=repeat) for repeat, speed in enumerate((210.0, 440.0))),
        run("partial_reduce", 9000.0, repeat=2, workers=8),
        replace(run("partial_reduce", 9000.0, repeat=2), machine="16 cores"),
        run("partial_reduce", 9000.0, repeat=2, left_out=1),
    ]
    settings = list(by_setting(rows).values())
    assert [len(found) for found in settings] == [5, 1, 1, 1]
    assert advantages(settings[0], "slow", "partial_reduce", "allreduce", "samples_per_s") == [2.1, 2.2]
    assert advantages(settings[0], "slow", "partial_reduce", "allreduce", "reached_s") == [0.0, 0.0]
    speed, time = goals(settings[0])
    assert "2.15 (2.10 to 2.20) in 2 repeat(s); goal 2: met" in speed
    assert "0.00 (0.00 to 0.00) in 2 repeat(s); goal 1.2: missed" in time


def test_of_a_run_that_was_measured_again_the_last_row_counts() -> None:
    from uneven_results import by_setting, table

    rows = [run("allreduce", 100.0), run("allreduce", 120.0, NAN)]
    assert list(by_setting(rows).values()) == [[rows[1]]]
    assert "0 of 1" in list(table([rows[1]], ["allreduce"]))[-1]


def test_older_rows_of_the_comparison_can_be_read(tmp_path: Path) -> None:
    from rows import append, read
    from uneven_results import Run

    older, path = run("allreduce", 100.0), tmp_path / "comparison.csv"
    names = [field.name for field in fields(Run)][:-3]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, [getattr(older, name) for name in names]])
    append(path, run("ddp", 100.0, left_out=1))
    assert read(Run, path) == [older, run("ddp", 100.0, left_out=1)]
    assert {row.left_out for row in read(Run, FOLDER / "hetero" / "comparison.csv")} <= {0, 1}


def test_detection_and_recovery_count_from_the_step_in_which_the_traffic_came() -> None:
    import series

    rates = (20, 20, 20, 20, 10, 10, 10, 10, 10, 19, 20, 20, 20, 20, 20, 20)
    rows = of_steps(*rates, traffic=range(4, 13), _7="alarm: star -> clique", _15="back to star")
    assert series.onset(rows) == 4
    assert series.detected_within(rows) == 4  # steps 4, 5, 6 and 7
    assert series.recovered_within(rows, 18.0) == 6  # from step 9 on; 8 is still slow
    assert series.recovered_within(rows, 25.0) == math.inf
    assert series.reverted_within(rows) == 3  # steps 13, 14 and 15
    assert series.settled_with_traffic(rows) == 19.5
    assert series.before_traffic(rows, first=1) == 20
    assert series.switches(rows) == 2
    assert series.without_cause(rows) == []


def test_without_an_alarm_nothing_was_detected_and_nothing_recovered() -> None:
    import series

    rows = of_steps(20, 20, 20, 20, 20, 20, 20, traffic=range(2, 7), _0="alarm: star stays")
    assert series.detected_within(rows) == series.recovered_within(rows, 1.0) == math.inf
    assert series.reverted_within(rows) == math.inf
    assert series.switches(rows) == 0
    assert series.without_cause(rows) == ["step 0: alarm: star stays"]


def test_one_good_step_is_no_recovery() -> None:
    import series

    rows = of_steps(10, 10, 20, 10, 10, 10, traffic=range(6), _1="alarm: star -> ring")
    assert series.recovered_within(rows, 18.0) == math.inf


def test_the_policys_lines_are_events_of_the_last_step_that_was_made() -> None:
    import series

    stays = ALARM.replace("step 8", "step 30").replace("star -> clique", "star stays")
    log = f"topology: star\n{ALARM}\n{stays}\n14:03:00 step 50: star is as quick again as it was (star 30.0 ms)\n"
    assert series.events_of(log) == {7: "alarm: star -> clique", 29: "alarm: star stays", 49: "back to star"}


def test_the_lines_are_those_that_the_policy_writes(caplog: pytest.LogCaptureFixture) -> None:
    """Their words are the policy's own: were they changed there alone, nothing would ever be detected."""
    import series

    from pl_pipe.adapt.policies import InterferencePolicy

    class Trainer:
        global_step, world_size, is_global_zero = 8, 4, True

    policy: Any = InterferencePolicy()
    with caplog.at_level("INFO", logger="pl_pipe"):
        for best in ("clique", None):
            policy._note(Trainer, "alarm", votes=3, present="star", best=best, seconds={"star": 0.09})
            policy._note(Trainer, "choice", present="ring", best=best, seconds={"ring": 0.09})
        policy._note(Trainer, "revert", present="clique", best="star", seconds={"star": 0.09})
    found = [series.events_of(record.getMessage()) for record in caplog.records]
    assert found == [
        {7: "alarm: star -> clique"}, {7: "by steps: ring -> clique"}, {7: "alarm: star stays"}, {},
        {7: "back to star"},
    ]  # fmt: skip


def test_the_best_alternative_under_the_same_traffic_is_what_adapting_is_measured_by() -> None:
    from interference import numbers

    adapting = of_steps(*[20] * 4, *[10] * 4, *[18] * 8, traffic=range(4, 16), _6="alarm: star -> ring")
    stay = {
        name: of_steps(*[20] * 4, *[rate] * 12, traffic=range(4, 16)) for name, rate in (("clique", 20), ("ring", 16))
    }
    told = numbers({"adapting": adapting, **stay})
    assert (told["best_alternative"], told["best_alternative_gives"]) == ("clique", 20)
    assert (told["detected_within"], told["recovered_within"], told["share_of_best"]) == (3, 5, 0.9)
    assert math.isnan(numbers({"adapting": adapting})["recovered_within"])


def test_time_to_the_small_batchs_accuracy() -> None:
    from batch import numbers

    def epochs(*points: tuple[float, float]) -> list[dict[str, Any]]:
        return [{"seconds": seconds, "accuracy": accuracy, "steps": 10} for seconds, accuracy in points]

    by_run = {
        "4 × 32": epochs((10, 0.2), (20, 0.295), (30, 0.30), (40, 0.28)),
        "adaptive": epochs((8, 0.2), (12, 0.291), (16, 0.27)),
        "4 × 1024": epochs((4, 0.1), (8, 0.12)),
    }
    small, adaptive, large = numbers(by_run, "4 × 32")
    assert (small["to_target_s"], adaptive["to_target_s"], large["to_target_s"]) == (20, 12, math.inf)
    assert (adaptive["share"], adaptive["share_of_all"], adaptive["accuracy"]) == (0.6, 0.3, 0.291)
    assert math.isnan(numbers({"adaptive": by_run["adaptive"]}, "4 × 32")[0]["to_target_s"])


def test_monitors_are_compared_with_the_plain_step_of_their_round() -> None:
    from series import added, quartiles

    shares = added({"plain": [1.0, 2.0, 4.0], "variance": [1.5, 2.5, 5.0]}, "plain")
    assert shares == {"plain": [0.0, 0.0, 0.0], "variance": [0.5, 0.25, 0.25]}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_a_pause_lies_between_the_last_step_of_some_workers_and_the_first_of_others() -> None:
    from series import worker_changes

    ends = ((0, 2, 100.0), (1, 2, 101.0), (3, 3, 115.5), (4, 3, 116.0))
    rows = [{"step": step, "workers": workers, "ended_at_s": end_s} for step, workers, end_s in ends]
    assert worker_changes(rows) == [{"after_step": 1, "workers": "2 -> 3", "pause_s": 14.5, "steps_included": 2}]


def test_rows_of_other_runs_and_settings_stay_when_a_part_is_measured_again(tmp_path: Path) -> None:
    from runs import keep_rows, of_setting

    def rows(name: str, accuracy: float, setting: str = "epochs=6; 2 cores") -> list[dict[str, Any]]:
        return [{"setting": setting, "run": name, "epoch": 0, "accuracy": accuracy}]

    path = tmp_path / "batch.csv"
    for found in (rows("4 × 32", 0.3), rows("adaptive", 0.2), rows("adaptive", 0.1, "epochs=2; 2 cores")):
        keep_rows(path, found)
    kept = keep_rows(path, rows("adaptive", 0.25))
    found = of_setting(kept, "epochs=6; 2 cores")
    assert {name: one[0]["accuracy"] for name, one in found.items()} == {"4 × 32": 0.3, "adaptive": 0.25}
    assert of_setting(kept, "epochs=2; 2 cores")["adaptive"][0]["accuracy"] == 0.1
    assert [file.name for file in tmp_path.iterdir()] == ["batch.csv"]


def test_a_run_is_done_only_with_the_same_traffic_and_if_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runs

    from pl_pipe.cluster import LabConfig

    made = []

    def rehearse(*_: Any, folder: Path, **__: Any) -> int:
        folder.mkdir(parents=True)
        made.append(folder)
        return 0

    def failing(*_: Any) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(runs, "Lab", nullcontext)
    monkeypatch.setattr(runs, "rehearse", rehearse)
    for traffic in ("80mbit", "80mbit", "90mbit"):
        runs.trained_in(LabConfig(), ["fit"], tmp_path / "run", happens=traffic)
    assert len(made) == 2
    for _ in range(2):
        with pytest.raises(runs.RunError, match="no such host"):
            runs.trained_in(LabConfig(), ["fit"], tmp_path / "other", failing)
    assert len(made) == 4
