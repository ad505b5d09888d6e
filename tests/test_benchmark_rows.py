"""What benchmarks of pipelines keep of their runs and say of them, and whom they blame for one that fails."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
NEWER = ("date", "machine", "overlap", "overlap_simulated")
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

    rows = [
        row("ddp", 2.0),
        row("auto", 3.0),
        row("ddp", 2.0, gbit=3.0),
        row("auto", 1.0, gbit=3.0),
    ]
    assert "is open: in no setting are they measured" in regrets(rows)
    rows.append(row("straight", 4.0))
    assert regrets(rows).startswith("In 1 setting(s) `plan=auto` is at worst +50.0% slower than the best of")
    assert "uniform was measured in 0 of them" in regrets(rows)
    rows += [row("uniform", 1.5), row("torch 1f1b", 99.0)]
    assert "at worst +100.0% slower" in regrets(rows)
    assert "uniform was measured in 1 of them" in regrets(rows)
    assert "over 6 runs in 2 settings (model × workers × rate)" in errors(rows), "torch's own are not simulated"
    assert measured_on(rows) == "7 runs measured before rows noted their date and machine."
    dated = [row("ddp", 2.0, date=f"2026-11-{day}", machine="2 cores") for day in (16, 15)]
    assert measured_on(dated) == "2 runs measured on 2026-11-15 to 2026-11-16 (2 cores)."


def test_overlaps_are_shown_where_a_run_had_a_timeline() -> None:
    from report import overlaps

    assert "is open: no run has a timeline" in overlaps([row("ddp", 2.0), row("auto", 1.0)])
    rows = [row("ddp", 2.0), row("auto", 1.0), row("straight", 1.0, overlap=0.84, overlap_simulated=0.9)]
    assert overlaps(rows).splitlines()[1:] == ["|---|---|---|---|", "| vgg16 | 4 | 10 | 84% (90%) |"]


def test_rows_of_another_machine_are_not_compared() -> None:
    from report import by_setting

    rows = [row("ddp", 2.0, machine="here"), row("auto", 1.0, machine="there"), row("straight", 1.5, machine="here")]
    ((_, _, _, compared),) = by_setting(rows)
    assert sorted(compared) == ["ddp", "straight"]


def test_a_rank_that_fails_is_named_though_others_hang() -> None:
    from hosts import Hosts

    hosts = Hosts.__new__(Hosts)
    fails = 'input(); print(\'{"error": "no memory"}\', flush=True)'
    hosts._servers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for code in ("import time; time.sleep(600)", fails)
    ]
    try:
        with pytest.raises(RuntimeError, match="rank 1 failed: no memory"):
            hosts.run("rehearsed", timeout_s=300.0)
    finally:
        for server in hosts._servers:
            server.kill()
            server.communicate()
