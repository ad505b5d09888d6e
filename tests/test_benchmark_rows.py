"""What benchmarks of pipelines keep of their runs and say of them, and whom they blame for one that fails."""

import csv
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
NEWER = ("date", "machine", "overlap", "overlap_simulated", "repeat", "minibatches")
FOLDER = Path(__file__).parents[1] / "benchmarks" / "pipedream"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def row(way: str, measured_s: float, *, gbit: float = 10.0, **settings: Any) -> Any:
    from speedup import Row

    return Row("vgg16", 4, gbit, way, "4", 20.0, 1.0, 1.0, measured_s, 0.1, 0.5, **settings)


def test_older_rows_can_still_be_read_and_added_to(tmp_path: Path) -> None:
    from rows import append, read
    from speedup import Row

    path = tmp_path / "speedup.csv"
    with path.open("w", newline="") as file:
        names = [*(name for name in Row.__dataclass_fields__ if name not in NEWER), "sent_bytes"]
        csv.writer(file).writerows([names, ["vgg16", 4, 10.0, "ddp", "4", 20.0, 1.0, 1.0, 2.0, 0.1, 0.5, 901529680]])
    assert read(Row, path) == [row("ddp", 2.0)]
    new = row("auto", 1.5, date="2026-11-15", machine="2 cores")
    append(path, new)
    append(path, new)
    assert read(Row, path) == [row("ddp", 2.0), new, new]
    assert read(Row, FOLDER / "speedup.csv")


def test_a_row_replaces_its_like_and_no_other_machines(tmp_path: Path) -> None:
    from rows import put, read
    from speedup import Row

    path = tmp_path / "new folder" / "speedup.csv"
    first, second = row("ddp", 2.0, machine="here"), row("ddp", 3.0, machine="here", repeat=1)
    elsewhere, again = row("ddp", 4.0, machine="there"), row("ddp", 5.0, machine="here")
    for each in (first, second, elsewhere, again):
        put(path, each)
    assert read(Row, path) == [second, elsewhere, again]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing stays beside it"


ADD = """
import sys
from pathlib import Path
from rows import append
from speedup import Row
print("ready", flush=True)
input()
for repeat in range(20):
    append(Path(sys.argv[1]), Row("vgg16", 4, 10.0, sys.argv[2], "4", 1.0, 1.0, 1.0, 1.0, 0.1, 0.5, repeat=repeat))
"""


def test_copies_side_by_side_lose_no_row(tmp_path: Path) -> None:
    from rows import read
    from speedup import Row

    path = tmp_path / "speedup.csv"
    copies = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, str(path), way], cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(FOLDER)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for way in ("ddp", "auto")
    ]  # fmt: skip
    try:
        for copy in copies:
            assert copy.stdout is not None
            assert copy.stdout.readline() == "ready\n"
        for copy in copies:
            assert copy.stdin is not None
            copy.stdin.write("\n")
            copy.stdin.flush()
        for copy in copies:
            copy.communicate(timeout=300.0)
            assert copy.returncode == 0
    finally:
        for copy in copies:
            copy.kill()
            copy.communicate()
    found = sorted((each.way, each.repeat) for each in read(Row, path))
    assert found == [(way, repeat) for way in ("auto", "ddp") for repeat in range(20)]


def test_a_change_waits_for_whoever_has_read_the_file(tmp_path: Path) -> None:
    from rows import append, locked, read, write
    from speedup import Row

    path = tmp_path / "speedup.csv"
    write(path, [row("ddp", 1.0)])
    other = threading.Thread(target=append, args=(path, row("auto", 2.0)), daemon=True)
    with locked(path):
        known = read(Row, path)
        other.start()
        other.join(0.2)  # without the lock it is done by then, and lost below
        write(path, [*known, row("straight", 3.0)])
    other.join(60.0)
    assert [each.way for each in read(Row, path)] == ["ddp", "straight", "auto"]


@pytest.mark.parametrize("minibatches", [16, 20])
@pytest.mark.parametrize("way", ["ddp", "auto", "straight", "uniform", "1f1b", "gpipe"])
def test_ways_are_measured_over_as_many_minibatches(way: str, minibatches: int) -> None:
    from speedup import Course, planned

    from pl_pipe.cluster import Cluster
    from pl_pipe.graph import read_graph

    graph = read_graph(FOLDER / "profiles" / "vgg16.graph.txt")
    plan = planned(graph, way, Cluster.flat(4, 0.955 * 10e9 / 8))
    course = Course.of(plan, way, minibatches=minibatches)
    assert minibatches <= course.timed < minibatches + 4 + course.at_once
    assert course.timed % course.at_once == 0, "whole rounds"
    assert course.stretch * course.at_once >= 4, "a stretch has a mini-batch for every rank"
    per_update = 1 if way == "ddp" else course.at_once
    marks = course.marks(per_update)
    assert len(marks) == course.stretches + 1 > 2
    assert marks[-1] - marks[0] == course.timed * per_update // course.at_once
    assert marks[0] >= per_update, "the first update is not timed"
    assert marks[-1] < course.minibatches * per_update // course.at_once


def test_a_run_that_fails_does_not_end_the_others_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from failures import Failures

    failures = Failures()
    ran = []
    for name in ("first", "second", "third"):
        with failures.noted(name):
            if name == "second":
                raise RuntimeError("rank 1 failed: no memory\nand more")
            ran.append(name)
    assert ran == ["first", "third"]
    assert "second failed; the others go on" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"1 failed; the same command tries them again: second \(rank 1 failed: no memory\)"
    ):
        failures.end()
    Failures().end()


class NoHosts:
    """Of a lab that is not needed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> "NoHosts":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __len__(self) -> int:
        return self.count

    def set_rate(self, bits_per_s: float) -> None: ...


def test_what_is_done_is_by_machine_repeat_and_minibatches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import speedup
    from rows import read, this_machine, write

    here, path = this_machine(), tmp_path / "speedup.csv"
    few = row("auto", 3.0, machine=here)
    known = [row("ddp", 1.0, machine=here, minibatches=16), row("straight", 2.0, machine="there", minibatches=16), few]
    write(path, known)
    asked = []

    def measured(hosts: Any, profile: Path, model: str, gbit: float, way: str, **options: Any) -> Any:
        asked.append((way, options["repeat"]))
        if way == "uniform":
            raise RuntimeError("rank 0 failed: no memory")
        return row(way, 9.0, machine=here, repeat=options["repeat"], minibatches=options["minibatches"])

    monkeypatch.setattr(speedup, "Hosts", NoHosts)
    monkeypatch.setattr(speedup, "measured", measured)
    command = ["speedup.py", "--models", "vgg16", "--gbits", "10", "--out", str(path), "--ways"]
    ways = ["ddp", "uniform", "auto", "straight"]
    monkeypatch.setattr(sys, "argv", [*command, *ways])
    with pytest.raises(SystemExit, match=r"1 failed; .* vgg16 10 Gbit/s uniform, repeat 0"):
        speedup.main()
    assert asked == [("uniform", 0), ("auto", 0), ("straight", 0)], "another machine's and shorter ones are not done"
    rows = read(speedup.Row, path)
    assert known[0] in rows
    assert known[1] in rows
    assert few not in rows, "it was measured anew"
    asked.clear()
    monkeypatch.setattr(sys, "argv", [*command, "ddp", "auto", "--repeats", "2"])
    speedup.main()
    assert asked == [("ddp", 1), ("auto", 1)]


def trained_row(way: str, to_accuracy_s: float, *, best: float = 0.9, **changes: Any) -> Any:
    from real import Row

    made = Row("vgg16", 2, 25.0, way, "1-1", 0, 100.0, to_accuracy_s, best, 0.95, 8, "2026-11-16", "here")
    return replace(made, **changes)


def test_runs_that_never_came_to_the_accuracy_are_counted() -> None:
    from real import tables

    runs = [trained_row("ddp", to_s, repeat=repeat) for repeat, to_s in enumerate((math.nan, 70.0, math.nan))]
    runs += [trained_row("auto", to_s, repeat=repeat) for repeat, to_s in enumerate((math.nan, 80.0, 70.0))]
    runs += [trained_row("straight", math.nan, best=math.nan)]
    said = [line.split(" | ") for line in tables(runs).splitlines()[4:]]
    assert [cells[8] for cells in said] == [
        "never (70 s to never), 1 of 3 reached it",
        "80 s (70 s to never), 2 of 3 reached it",
        "-",
    ]
    turned = [line.split(" | ")[8] for line in tables(runs[::-1]).splitlines()[4:]]
    assert turned == [cells[8] for cells in said]


def test_trainings_of_another_machine_are_not_done_nor_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import real
    import torch
    from rows import read, this_machine, write

    threads = torch.get_num_threads()
    here, path = this_machine(), tmp_path / "real.csv"
    there = trained_row("ddp", 10.0, samples_per_s=1.0, machine="there")
    write(path, [there, trained_row("auto", 20.0, machine=here)])
    asked: list[str] = []
    profiled_with: list[int] = []

    def planned(*_: Any) -> None:
        profiled_with.append(torch.get_num_threads())

    def trained(hosts: Any, model: str, mbit: float, way: str, **options: Any) -> Any:
        asked.append(way)
        return trained_row(way, 30.0, machine=here)

    monkeypatch.setattr(real, "Hosts", NoHosts)
    monkeypatch.setattr(real, "planned", planned)
    monkeypatch.setattr(real, "trained", trained)
    command = ["real.py", "--models", "vgg16", "--hosts", "2", "--mbit", "25", "--accuracy", "0.95", "--repeats", "1"]
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(path)])
        real.main()
        assert asked == ["ddp", "straight"]
        assert profiled_with == [1], "as the ranks that will train"
        said = capsys.readouterr().out
        assert "| vgg16 | 2 | 25 | auto | 1-1 | 1 | 100 | 1.00 |" in said, "against this machine's data parallel"
        asked.clear()
        monkeypatch.setattr(sys, "argv", [*command, "--again", "--out", str(path)])
        real.main()
    finally:
        torch.set_num_threads(threads)
    assert asked == ["ddp", "auto", "straight"]
    rows = read(real.Row, path)
    assert [each.way for each in rows] == ["ddp", "ddp", "auto", "straight"], "row by row in the place of the others"
    assert rows[0] == there
    assert real.tables(read(real.Row, FOLDER / "real.csv")), "what was measured before can be read"


def test_rows_are_simulated_again_unless_their_plan_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rows import read, write
    from speedup import Row, planned, simulate_again, simulated_step_s

    from pl_pipe.cluster import Cluster
    from pl_pipe.graph import read_graph

    graph = read_graph(FOLDER / "profiles" / "vgg16.graph.txt")
    plan = planned(graph, "straight", Cluster.flat(4, 0.955 * 10e9 / 8))
    kept = {"measured_s": 2.0, "spread_s": 0.1, "cores": 0.5, "date": "2026-11-15", "machine": "2 cores"}
    stale = Row("vgg16", 4, 10.0, "1f1b", plan.shape, 20.0, plan.predicted_step_s, 1.0, **kept)
    reshaped = Row("vgg16", 4, 10.0, "straight", "3-1", 20.0, plan.predicted_step_s, 1.0, **kept)
    recut = Row("vgg16", 4, 10.0, "straight", plan.shape, 20.0, 1.1 * plan.predicted_step_s, 1.0, **kept)
    path = tmp_path / "speedup.csv"
    write(path, [stale, reshaped, recut])
    simulate_again(path, FOLDER / "profiles")
    assert read(Row, path) == [replace(stale, simulated_s=simulated_step_s(plan, "1f1b")), reshaped, recut]
    said = capsys.readouterr().out
    assert "straight: the plan measured, 3-1, is not today's; take its row out and measure it again" in said
    assert said.count("measure it again") == 2
    assert "1 of 3 rows changed" in said
    with pytest.raises(SystemExit, match="has no rows to simulate again"):
        simulate_again(tmp_path / "none.csv", FOLDER / "profiles")


def test_a_report_compares_only_what_was_measured() -> None:
    from report import errors, measured_on, regrets
    from settings import settings_of

    rows = [
        row("ddp", 2.0),
        row("auto", 3.0),
        row("ddp", 2.0, gbit=3.0),
        row("auto", 1.0, gbit=3.0),
    ]
    assert "is open: in no setting are they measured" in regrets(settings_of(rows))
    rows.append(row("straight", 4.0))
    assert regrets(settings_of(rows)).startswith("In 1 setting(s) `plan=auto` is at worst +50.0% slower than the best")
    assert "uniform was measured in 0 of them" in regrets(settings_of(rows))
    assert "1 time(s) `auto` is the straight or the uniform plan itself" in regrets(settings_of(rows))
    assert "differs by up to 25.0%" in regrets(settings_of(rows)), "the same program, 3 s and 4 s"
    rows += [replace(row("uniform", 1.5), plan="1-1"), row("torch 1f1b", 99.0)]
    assert "at worst +100.0% slower" in regrets(settings_of(rows))
    assert "uniform was measured in 1 of them" in regrets(settings_of(rows))
    said = errors(settings_of(rows))
    assert said.count("over 6 cases in 2 settings (model × workers × rate)") == 2, "torch's own are not simulated"
    assert measured_on(rows) == "7 runs measured before rows noted their date and machine."
    dated = [row("ddp", 2.0, date=f"2026-11-{day}", machine="2 cores") for day in (16, 15)]
    assert measured_on(dated) == "2 runs measured on 2026-11-15 to 2026-11-16 (2 cores)."


def test_errors_of_planner_and_simulator_are_told_apart_and_by_way() -> None:
    from report import errors
    from settings import settings_of

    rows = [
        replace(row("ddp", 1.25), simulated_s=1.0, predicted_s=1.0),
        replace(row("auto", 1.0), simulated_s=1.02, predicted_s=0.5),
        replace(row("straight", 1.0), simulated_s=0.95, predicted_s=0.9),
        replace(row("gpipe", 1.0), simulated_s=1.0, predicted_s=0.1),
        replace(row("torch gpipe", 1.0), simulated_s=0.1, predicted_s=0.1),
    ]
    said = errors(settings_of(rows))
    simulator = (
        "The simulator is off by 3.5% in the median (goal: at most 10%, met) and by 20.0% at worst "
        "(goal: at most 25%, met; vgg16, 4 workers, 10 Gbit/s, ddp), over 4 cases in 1 settings"
    )
    planner = (
        "The planner is off by 20.0% in the median (goal: at most 10%, missed) and by 50.0% at worst "
        "(goal: at most 25%, missed; vgg16, 4 workers, 10 Gbit/s, auto), over 3 cases in 1 settings"
    )
    assert simulator in said
    assert planner in said, "flushes it does not price"
    assert "| ddp | 1 | 1.25 (1.25 to 1.25) | 1.25 (1.25 to 1.25) |" in said
    assert "| gpipe | 1 | 1.00 (1.00 to 1.00) |  |" in said
    assert "| all but ddp and torch's | 3 | 1.00 (0.98 to 1.05) | 1.56 (1.11 to 2.00) |" in said
    assert "is open: nothing that it knows was measured" in errors(settings_of([row("torch 1f1b", 1.0)]))


def test_repeats_are_reported_as_medians_with_ranges() -> None:
    from report import errors, speedups
    from settings import settings_of

    counted: dict[str, Any] = {"machine": "here", "minibatches": 16}
    rows = [row("ddp", time_s, repeat=repeat, **counted) for repeat, time_s in enumerate((4.0, 3.0, 3.6))]
    rows += [row("auto", time_s, repeat=repeat, **counted) for repeat, time_s in enumerate((2.0, 1.5, 1.8))]
    older = row("auto", 90.0, machine="here")
    recut = replace(row("auto", 80.0, **counted), plan="3-1")
    (setting,) = settings_of([older, recut, *rows])
    assert len(setting.runs["auto"].rows) == 3, "neither of another plan, nor from before mini-batches were counted"
    said = speedups([setting])
    assert "| vgg16 | 4 | 10 | 3 | 3600 | 4 | 1.00 | 1.00 | **2.00** (1.50 to 2.67) | 200% |" in said
    assert "slowest run of 2 ways that were measured several times: 27.8% in the median" in errors([setting])
    assert "**2.00** | 200%" in speedups(settings_of([row("ddp", 4.0), row("auto", 2.0)])), "of one run no range"


def test_overlaps_are_shown_where_a_run_had_a_timeline() -> None:
    from report import overlaps
    from settings import settings_of

    assert "is open: no run has a timeline" in overlaps(settings_of([row("ddp", 2.0), row("auto", 1.0)]))
    rows = [row("ddp", 2.0), row("auto", 1.0), row("straight", 1.0, overlap=0.84, overlap_simulated=0.9)]
    assert overlaps(settings_of(rows)).splitlines()[1:] == ["|---|---|---|---|", "| vgg16 | 4 | 10 | 84% (90%) |"]


def test_rows_of_another_machine_are_not_compared() -> None:
    from settings import settings_of

    rows = [row("ddp", 2.0, machine="here"), row("auto", 1.0, machine="there"), row("straight", 1.5, machine="here")]
    assert [(of.machine, sorted(of.runs)) for of in settings_of(rows)] == [
        ("here", ["ddp", "straight"]),
        ("there", ["auto"]),
    ]


def test_a_report_takes_several_files_and_older_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import report
    from rows import write

    docs, new = tmp_path / "docs", tmp_path / "new.csv"
    (docs / "images").mkdir(parents=True)
    (docs / "benchmarks.md").write_text("before\n<!-- pipedream -->\nold\n<!-- end -->\nafter\n")
    write(
        new, [row(way, time_s, date="2026-11-17", machine="16 cores") for way, time_s in (("ddp", 3.0), ("auto", 2.0))]
    )
    command = ["report.py", "--docs", str(docs), "--measured"]
    monkeypatch.setattr(sys, "argv", [*command, str(FOLDER / "speedup.csv"), str(new)])
    report.main()
    written = (docs / "benchmarks.md").read_text()
    assert written.startswith("before\n<!-- pipedream -->\n")
    assert written.endswith("<!-- end -->\nafter\n")
    assert "2 runs measured on 2026-11-17 (16 cores)." in written
    assert "**1.50**" in written.split("(16 cores).")[1], "each machine has tables of its own"
    assert "runs measured on 2026-11-16 to 2026-11-17 (2 cores, aarch64" in written
    assert sorted(entry.name for entry in (docs / "images").iterdir()) == [
        "pipedream_simulated.png",
        "pipedream_speedup.png",
    ]
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit):
        report.main()
    assert "there is no" in capsys.readouterr().err


SERVE = """
import json, sys, time
for line in sys.stdin:
    if json.loads(line)["work"] == "fails":
        if sys.argv[1] == "0":
            time.sleep(600)
        print('{"error": "no memory"}', flush=True)
    else:
        print('{"trains": true}\\n{"trains": false}\\n{"answer": "done"}', flush=True)
"""


def test_a_rank_that_fails_is_named_though_others_hang_and_the_next_run_finds_new_ones() -> None:
    from hosts import Hosts

    class Local(Hosts):
        """Without a lab."""

        def __init__(self) -> None:
            self._servers = []
            self._rate, self.caps = 5.0, []
            self._start()

        def _cap(self, bits_per_s: float) -> None:
            self.caps.append(bits_per_s)

        def _start(self) -> None:
            self._servers += [
                subprocess.Popen(
                    [sys.executable, "-c", SERVE, rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                    start_new_session=True,
                )
                for rank in "01"
            ]  # fmt: skip

    hosts = Local()
    try:
        first = list(hosts._servers)
        with pytest.raises(RuntimeError, match="rank 1 failed: no memory"):
            hosts.run("fails", timeout_s=300.0)
        assert [server.returncode for server in first] == [-signal.SIGKILL] * 2
        assert hosts.run("rehearsed", timeout_s=300.0) == ["done", "done"]
        assert hosts.caps == []
        assert hosts.run("rehearsed", timeout_s=300.0, waits=False) == ["done", "done"]
        assert hosts.caps == [10e9, 5.0, 10e9], "models are sent quickly, and trained at the rate asked for"
    finally:
        for server in hosts._servers:
            server.kill()
            server.communicate()
