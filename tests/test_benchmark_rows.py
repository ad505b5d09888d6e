"""What benchmarks of pipelines keep of their runs and say of them, and whom they blame for one that fails."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
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
        names = [*(name for name in Row.__dataclass_fields__ if name not in ("date", "machine")), "sent_bytes"]
        csv.writer(file).writerows([names, ["vgg16", 4, 10.0, "ddp", "4", 20.0, 1.0, 1.0, 2.0, 0.1, 0.5, 901529680]])
    assert read(Row, path) == [row("ddp", 2.0)]
    new = row("auto", 1.5, date="2026-11-15", machine="2 cores")
    append(path, new)
    append(path, new)
    assert read(Row, path) == [row("ddp", 2.0), new, new]
    assert read(Row, FOLDER / "speedup.csv")


def test_a_report_compares_only_what_was_measured() -> None:
    from report import errors, measured_on, regrets

    rows = [
        row("ddp", 2.0),
        row("auto", 3.0),
        row("straight", 4.0),
        row("ddp", 2.0, gbit=3.0),
        row("auto", 1.0, gbit=3.0),
    ]
    assert "is open: in no setting are all of them measured" in regrets(rows)
    rows.append(row("uniform", 5.0))
    told = "In the 1 setting(s) where all of them are measured, `plan=auto` is at worst +50.0% slower than the best of"
    assert regrets(rows).startswith(told)
    assert "over 6 runs in 2 settings (model × workers × rate)" in errors(rows)
    assert measured_on(rows) == "6 runs measured before rows noted their date and machine."
    dated = [row("ddp", 2.0, date=f"2026-11-{day}", machine="2 cores") for day in (16, 15)]
    assert measured_on(dated) == "2 runs measured on 2026-11-15 to 2026-11-16 (2 cores)."


@pytest.mark.timeout(60)
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
            hosts.run("rehearsed", timeout_s=30.0)
    finally:
        for server in hosts._servers:
            server.kill()
            server.communicate()
