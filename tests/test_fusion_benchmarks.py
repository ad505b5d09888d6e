"""Benchmarks of fusion: what is still to be measured, by which processes, how it is kept, and what is made of it."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "fusion"
WAITS = "while not (folder / f'go_{name}').exists(): time.sleep(0.01)"
CELL = f"""
import json, sys, time
from pathlib import Path
folder, name = Path(sys.argv[-3]), sys.argv[-1]
said = sys.argv[1]
if said == "fails" or said == name:
    sys.exit("no memory")
if said != "never":
    (folder / f"ready_{{name}}").touch()
    {WAITS}
    print(json.dumps({{"workload": "bert", "mode": "auto", "samples_s": 10.0, "torch_gib": 1.5}}))
else:
    time.sleep(600)
"""
"""Stands for cell.py: it is ready and gives a rate, or fails, or is never ready."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def command(said: str) -> list[str]:
    return [sys.executable, "-c", CELL, said]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def row(workload: str, mode: str, variants: int, rate: float | str, **more: str) -> dict[str, str]:
    return {
        "workload": workload, "mode": mode, "variants": str(variants), "precision": "bf16", "samples_s": str(rate),
        "run": "today", "gpu": "H200", **more,
    }  # fmt: skip


# ---- which cells


def test_what_trains_one_model_is_measured_once_and_workloads_one_after_another() -> None:
    from gpu import CELL as NAMES
    from gpu import cells_of
    from speed_rows import key

    portions = cells_of(["bert", "pointnet"], [1, 8], ["bf16"], ["auto", "serial eager", "mps", "plain lightning"])
    assert [[key(cell, NAMES) for cell in cells] for cells in portions] == [
        [
            ("bert", "bf16", "1", "auto"),
            ("bert", "bf16", "1", "serial eager"),
            ("bert", "bf16", "1", "mps"),
            ("bert", "bf16", "1", "plain lightning"),
            ("pointnet", "bf16", "1", "auto"),
            ("pointnet", "bf16", "1", "serial eager"),
            ("pointnet", "bf16", "1", "mps"),
            ("pointnet", "bf16", "1", "plain lightning"),
        ],
        [(name, "bf16", "8", mode) for name in ("bert", "pointnet") for mode in ("auto", "mps")],
    ]
    ((serial, fused),) = cells_of(["bert"], [8], ["bf16"], ["serial eager", "auto", "plain lightning"])
    assert (serial["variants"], fused["variants"]) == (1, 8), "plain Lightning is for arrays of one"


def test_a_second_call_measures_what_the_first_has_not() -> None:
    from gpu import CELL as NAMES
    from speed_rows import done

    rows = [
        row("bert", "auto", 8, 100.0),
        row("bert", "vmap", 8, "", error="no rule"),
        row("bert", "mps", 8, 90.0, run="yesterday"),
        row("bert", "mps", 8, 90.0, gpu="another"),
    ]
    auto, vmap = ("bert", "bf16", "8", "auto"), ("bert", "bf16", "8", "vmap")
    assert done(rows, NAMES, run="today", gpu="H200", failed_too=True) == {auto: 1, vmap: 1}
    assert done([*rows, rows[0]], NAMES, run="today", gpu="H200", failed_too=False) == {auto: 2}


def test_plain_models_are_compiled_for_once() -> None:
    from gpu import cells_of, to_compile

    modes = ["auto", "serial eager", "serial compiled", "vmap", "branches of plain models", "mps"]
    (cells,) = cells_of(["bert"], [8], ["bf16"], modes)
    assert [(cell["mode"], cell["variants"]) for cell in to_compile(cells)] == [("auto", 8), ("serial compiled", 1)]


# ---- processes


def test_a_cell_is_let_go_when_it_is_ready_and_its_row_is_taken() -> None:
    from cell_process import Limits, measured_alone

    patient = Limits(ready_s=600.0, each_s=600.0)
    found = measured_alone(command("ready"), patient)
    assert found == {"workload": "bert", "mode": "auto", "samples_s": 10.0, "torch_gib": 1.5}
    failed = measured_alone(command("fails"), patient)
    assert failed == {"error": "no result: no memory"}


def test_cells_that_are_not_ready_are_ended_before_any_is_timed(tmp_path: Path) -> None:
    from cell_process import Cell, wait_until_ready

    with Cell(command("never"), tmp_path, "late") as late, Cell(command("ready"), tmp_path, "early") as early:
        while not early.is_ready:
            time.sleep(0.01)
        assert wait_until_ready([late, early], 0.0) == [late]
        assert not is_alive(late.pid)
        assert not early.is_over
    assert not is_alive(early.pid), "no cell outlives its block"


@pytest.mark.parametrize(
    ("said", "why"),
    [("never", "2 of 2 processes not ready after 0 s"), ("process1", "1 of 2 processes failed: no result: no memory")],
)
def test_rates_are_added_up_only_where_all_processes_were_ready(said: str, why: str) -> None:
    from cell_process import Limits, measured_at_once

    limits = Limits(ready_s=0.0 if said == "never" else 600.0, each_s=1.0)
    assert measured_at_once(command(said), 2, limits)["error"].startswith(why)
    ready = measured_at_once(command("ready"), 2, Limits(ready_s=600.0, each_s=600.0))
    assert ready == {"samples_s": 20.0, "torch_gib": 3.0}


def test_processes_that_are_timed_together_count_in_the_same_seconds() -> None:
    """This one takes 0.1 s a step until others, that are slower, are over, and half of it from then on."""
    from clock import counted_steps

    clock = [0.0]

    def step() -> None:
        clock[0] += 0.1 if clock[0] < 8.0 else 0.05

    assert counted_steps(step, 2.05, 4.0, now=lambda: clock[0]) == pytest.approx(40)
    assert clock[0] >= 2.05 + 2 * 4.0, "it computes on while others count"
    with pytest.raises(RuntimeError, match="began after the moment"):
        counted_steps(step, 1.0, 4.0, now=lambda: clock[0])


@pytest.mark.parametrize("profiles", [False, True])
def test_kernels_are_those_of_steps_after_the_timed_ones(tmp_path: Path, profiles: bool) -> None:
    from clock import BLOCKS, Clock
    from kernels import STEPS

    path, over = tmp_path / "kernels.csv", []
    clock = Clock(
        is_settled=lambda *_: True,
        ready=lambda: None,
        block_s=0.0,
        then=over.append,
        kernels=path if profiles else None,
    )
    trainer = SimpleNamespace(should_stop=False, limit_train_batches=1)
    steps = 0
    while not trainer.should_stop:
        assert not path.exists()
        clock.on_train_batch_end(trainer, None, None, None, steps)
        steps += 1
    assert (len(clock.seconds), over) == (BLOCKS, [trainer])
    assert steps == 1 + 10 + 2 * BLOCKS + (STEPS if profiles else 0)
    assert path.exists() == profiles
    for _ in range(2 * STEPS):
        clock.on_train_batch_end(trainer, None, None, None, steps)
    assert over == [trainer], "it has ended once, also where batches follow"


def test_all_are_told_the_same_moment(tmp_path: Path) -> None:
    from cell_process import Cell
    from clock import Gate

    with Cell(command("ready"), tmp_path, "one", 1) as one, Cell(command("ready"), tmp_path, "two", 1) as two:
        one.go(at=12.5)
        two.go()
        assert Gate(str(tmp_path), "one").wait() == 12.5
        assert Gate(str(tmp_path), "two").wait() is None


def test_without_mps_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from cell_process import Limits, measured_under_mps

    monkeypatch.setenv("PATH", "/nowhere")
    before = dict(os.environ)
    assert measured_under_mps(command("ready"), 2, Limits())["error"].startswith("MPS: FileNotFoundError")
    assert dict(os.environ) == before


class Noted:
    """A cell that is ready at its second look."""

    running: ClassVar[list[dict[str, Any]]] = []
    most: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        self._looks = 0
        self.running.append(cell)
        self.most.append((len(self.running), sum(one["variants"] for one in self.running)))

    def __enter__(self) -> "Noted":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    is_over = False

    @property
    def is_ready(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def stop(self) -> None:
        if self.cell in self.running:
            self.running.remove(self.cell)


@pytest.mark.parametrize(("within_s", "started"), [(100.0, 5), (0.0, 0)])
def test_a_cache_is_filled_by_no_more_processes_and_variants_than_fit(
    monkeypatch: pytest.MonkeyPatch, within_s: float, started: int
) -> None:
    import cell_process

    monkeypatch.setattr(Noted, "running", [])
    monkeypatch.setattr(Noted, "most", [])
    monkeypatch.setattr(cell_process, "_LOOK_S", 0.0)
    cells = [{"name": number, "variants": variants} for number, variants in enumerate((32, 8, 8, 1, 1))]
    cell_process.fill_cache(
        cells, start=lambda cell, *_: Noted(cell), side_by_side=3, variants=16, within_s=within_s
    )  # fmt: skip
    assert len(Noted.most) == started
    assert all(variants <= 16 or processes == 1 for processes, variants in Noted.most)
    assert all(processes <= 3 for processes, _ in Noted.most)
    assert not Noted.running


@pytest.mark.parametrize("mode", ["auto", "branches of plain models"])
def test_every_cell_is_timed_alone_after_all_have_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    import gpu

    seen: list[tuple[str, list[str]]] = []

    def alone(command: list[str], limits: Any) -> dict[str, Any]:
        seen.append(("alone", [command[command.index("--workload") + 1]]))
        return {"samples_s": 1.0} if "bert" in command else {"error": "no memory"}

    monkeypatch.setattr(gpu, "measured_alone", alone)
    monkeypatch.setattr(gpu, "fill_cache", lambda cells, **_: seen.append(("fill", [one["workload"] for one in cells])))
    monkeypatch.setattr(gpu, "gpu_name", lambda: "H200")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    asked = ["--out", str(tmp_path), "--workload", "pointnet", "bert", "--variants", "8", "--precision", "bf16"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *asked, "--modes", mode])
    with pytest.raises(SystemExit, match=f"1 cells failed:\npointnet, bf16, 8, {mode}: no memory"):
        gpu.main()
    assert [path.name for path in tmp_path.glob("fusion_speed_*.png")] == ["fusion_speed_bert.png"]
    assert seen == [("fill", ["pointnet", "bert"]), ("alone", ["pointnet"]), ("alone", ["bert"])]


def test_a_stopped_benchmark_has_kept_its_rows_and_goes_on(tmp_path: Path) -> None:
    """The second cell brings the first call down; a second call measures that one alone, a third all once more."""
    script = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpu
sys.argv = ["gpu.py", "--out", {str(tmp_path)!r}, "--workload", "bert", "pointnet", "--variants", "8", "--run", "one",
            "--precision", "bf16", "--modes", "auto", "--wave", "1", "--repeats", "{{repeats}}"]
gpu.gpu_name = lambda: "H200"

def measured(cell, **_):
    if cell["workload"] == "pointnet" and {{stops}}:
        import os
        os._exit(9)
    return {{{{"samples_s": 5.0}}}}

gpu.measured = measured
gpu.main()
"""
    for stops, repeats, code in ((True, 1, 9), (False, 1, 0), (False, 2, 0)):
        command = [sys.executable, "-c", script.format(stops=stops, repeats=repeats)]
        assert subprocess.run(command, check=False, timeout=600).returncode == code
        with (tmp_path / "speed.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        workloads = ["bert"] if stops else ["bert", "pointnet"] * repeats
        assert [(one["workload"], one["run"], one["gpu"]) for one in rows] == [
            (name, "one", "H200") for name in workloads
        ]
        assert (tmp_path / "fusion_speed_bert.png").exists() is not stops


def test_rows_do_not_go_into_a_file_with_other_columns(tmp_path: Path) -> None:
    from speed_rows import append, check_columns

    path = tmp_path / "speed.csv"
    append(path, ("a", "b"), {"a": 1})
    append(path, ("a", "b"), {"a": 2, "b": 3}, {"b": 4, "c": 5})
    assert path.read_text().split() == ["a,b", "1,", "2,3", ",4"]
    check_columns(path, ("a", "b"))
    with pytest.raises(SystemExit, match="has other columns"):
        check_columns(path, ("a", "b", "c"))


# ---- what is made of rows


def test_rates_are_compared_within_the_last_run_on_its_gpu() -> None:
    from speeds import Speeds, of_run

    rows = [
        row("bert", "serial eager", 8, 1.0, run="earlier"),
        row("bert", "serial eager", 8, 4.0, gpu="another"),
        row("bert", "serial eager", 1, 2.0),
        *(row("bert", "auto", 8, rate) for rate in (99.0, 10.0, 9.0)),
    ]
    speeds = Speeds.of(of_run(rows), "bf16")
    assert speeds.ratio("bert", "auto", 8) == 5.0, "the median of three"
    assert speeds.ratio("bert", "auto", 4) is None
    with pytest.raises(SystemExit, match=r"no rows of a run 'later'; there are those of earlier, today"):
        of_run(rows, "later")


def test_all_workloads_are_shown_for_the_most_variants_they_have_in_common() -> None:
    from speeds import Speeds

    rows = [row(name, "auto", count, 1.0) for name in ("bert", "pointnet") for count in (1, 1, 8)]
    rows += [row("bert", "auto", 32, 1.0), row("pointnet", "serial eager", 32, 1.0)]
    assert Speeds.of(rows, "bf16").common_count() == 8
    assert Speeds.of([row("bert", "serial eager", 8, 1.0)], "bf16").common_count() is None


def test_ratios_have_no_bar_without_their_unit() -> None:
    pytest.importorskip("matplotlib")
    from figures import ratios
    from speeds import Speeds

    rows = [row("bert", "serial eager", 1, 2.0), row("bert", "auto", 8, 10.0), row("pointnet", "auto", 8, 10.0)]
    found = ratios(Speeds.of(rows, "bf16"), 8)
    assert found == {"auto": {"bert": 5.0}, "serial eager": {"bert": 1.0}}


def test_a_report_says_what_was_not_measured() -> None:
    from speed_report import goals, overhead, table
    from speeds import Speeds

    rows = [
        *(row("bert", "serial eager", 1, 2e3), row("bert", "mps", 8, 8e3), row("bert", "auto", 8, 10e3)),
        *(row("bert", "auto", 1, 3e3), row("bert", "plain lightning", 1, 2.4e3), row("pointnet", "auto", 8, 5e3)),
    ]
    speeds = Speeds.of(rows, "bf16")
    assert table(speeds, 8).splitlines() == [
        "| workload | auto | serial eager | mps |",
        "|---|---|---|---|",
        "| bert | 10 (5.0 ×) | 2 | 8 (4.0 ×) |",
        "| pointnet | 5 | - | - |",
    ]
    best, mps, serial = goals(speeds, 8, "auto")
    again = Speeds.of([*rows, row("bert", "auto", 8, 9e3)], "bf16")
    assert "branches of plain models; 9 to 10 in 2 against 8 to 8 in 1)" in goals(again, 8, "auto")[0]
    assert "bert 1.250 (mps, without serial compiled and vmap and branches of plain models)" in best
    assert mps.endswith("bert 1.25; pointnet not measured")
    assert serial.endswith("bert 5.00; pointnet not measured")
    assert overhead(speeds, ["auto"])[0].endswith("over plain Lightning's: bert -20.0%")


def test_rows_of_before_are_still_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from figures import bars, convergence, speedups
    from speed_rows import read
    from speeds import of_run, read_runs

    rows = read_runs(FOLDER / "results")
    assert {"h200_first", "h200_second", "h200_third"} <= {one["run"] for one in rows}
    assert len(speedups(of_run(rows, "h200_third"), tmp_path)) == 6
    assert bars(of_run(rows, "h200_third"), tmp_path) == [], "it has no serial rows"
    assert bars(of_run(rows, "h200_first"), tmp_path) == [tmp_path / "fusion_speed.png"]
    assert convergence(read(FOLDER / "results" / "h200_convergence.csv"), tmp_path)


def test_trainings_that_have_ended_are_not_repeated(tmp_path: Path) -> None:
    from convergence import COLUMNS, curves_in, differences
    from speed_rows import append

    own = {"epochs": 2, "images": 100, "formulation": "auto", "schedule": "cosine", "gpu": "H200"}
    for name, losses in (("fused", (1.0, 0.5)), ("separate", (1.1, 0.75))):
        rows = [
            {"arithmetic": "tf32", "lr": 0.001, "epoch": epoch, "run": name, "val_loss": loss, **own}
            for epoch, loss in enumerate(losses, 1)
        ]
        append(tmp_path / "convergence.csv", COLUMNS, *rows)
    curves = curves_in(tmp_path / "convergence.csv", own)
    assert curves == {("tf32", "fused", 0.001): [1.0, 0.5], ("tf32", "separate", 0.001): [1.1, 0.75]}
    assert differences(curves, "tf32") == ["tf32, lr 0.001, fused: 0.25 at most from the separate run"]
    assert curves_in(tmp_path / "convergence.csv", {**own, "epochs": 8}) == {}


def test_an_array_that_was_divided_is_no_measurement() -> None:
    from cell import check_width

    check_width(8, 8)
    with pytest.raises(RuntimeError, match="an array of 4 is trained, 8 variants were asked for"):
        check_width(4, 8)


# ---- cells as children of their driver


def test_a_cell_is_a_child_with_its_own_output_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cell_process import Cell, command_of
    from forked import Forked

    def main(arguments: list[str]) -> None:
        if arguments[1] == "never":
            time.sleep(600)
        row = {"workload": arguments[1], "threads": os.environ["OMP_NUM_THREADS"]}
        os.write(1, json.dumps(row).encode())  # pytest has another stdout

    monkeypatch.setitem(sys.modules, "cell", SimpleNamespace(main=main))
    before = os.environ.get("OMP_NUM_THREADS")
    with Cell(command_of({"workload": "bert"}, small=False), tmp_path, "one") as one:
        assert isinstance(one._process, Forked)
        assert one.result(60.0) == {"workload": "bert", "threads": "2"}
    assert os.environ.get("OMP_NUM_THREADS") == before
    with Cell(command_of({"workload": "never"}, small=False), tmp_path, "other") as other:
        assert "no result within 0 s" in other.result(0.2)["error"]
    assert not is_alive(other.pid)
