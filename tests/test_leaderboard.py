"""What is printed of variants can be compared with their checkpoints, and read where there is little room."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from pl_pipe.report import leaderboard
from pl_pipe.report.leaderboard import Leaderboard, Row, draw_curves
from pl_pipe.strategies.fusion.variant_records import VariantRecords


def test_the_last_value_is_told_beside_the_best() -> None:
    rows = [
        Row(0, {"lr": 0.1}, "trained", 66, 0.9521, 44, {"val_acc": 0.9421}),
        Row(1, {}, "waiting", 0, None, None, {}),
    ]
    first, second = str(Leaderboard.ranked(rows, monitor="val_acc", mode="max")).splitlines()
    assert first == "variant 0 (lr=0.1): val_acc 0.9521 after step 44, 0.9421 at the end, 66 steps, trained"
    assert second == "variant 1 (as given), 0 steps, waiting"


def test_a_narrow_terminal_shows_fewer_metrics_and_cuts_nothing() -> None:
    last = {"train_loss": 0.123456, "val_loss": 0.123456, "val_acc": 0.9421}
    choice = {"lr": 0.1, "weight_decay": 0.0005, "label_smoothing": 0.1}
    rows = [Row(0, choice, "trained", 660, 0.95, 440, last), Row(1, choice, "halved at 220", 220, 0.9, 220, last)]
    board = Leaderboard.ranked(rows, monitor="val_acc", mode="max")
    for width, metrics in ((80, 0), (100, 1), (200, 3)):
        file = io.StringIO()
        Console(width=width, file=file).print(board.table(width))
        text = file.getvalue()
        assert text.count("last") == metrics
        for word in ("halved", "220", "0.0005", "0.95"):
            assert word in text, (width, word)
        assert "…" not in text


@pytest.mark.parametrize(("status", "columns"), [("trained", 5), ("halved at 220", 6)])
def test_how_a_variant_ended_is_told_where_one_has_not_trained_to_the_end(status: str, columns: int) -> None:
    rows = [Row(0, {"lr": 0.1}, "trained", 660, 0.95, 440, {}), Row(1, {"lr": 0.2}, status, 220, 0.9, 220, {})]
    table = Leaderboard.ranked(rows, monitor="val_acc", mode="max").table()
    assert len(table.columns) == columns
    assert list(table.columns[-1].cells) == (["660", "220"] if status == "trained" else ["", status])


def test_a_picture_has_no_empty_panels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []

    @contextmanager
    def kept(path: Path, **size: Any) -> Iterator[Figure]:
        drawn.append(Figure())
        yield drawn[0]

    monkeypatch.setattr(leaderboard, "figure", kept)
    draw_curves({0: {name: [(1, 0.5), (2, 0.25)] for name in "abcd"}}, {0: "lr=0.1"}, tmp_path / "variants.png")
    assert [panel.axison for panel in drawn[0].axes] == [True] * 4 + [False] * 2


def test_what_was_noted_stays_whatever_becomes_of_the_tensor() -> None:
    records = VariantRecords([{}, {}], monitor=None, mode=None)
    loss = torch.tensor(2.0)
    records.note({"loss/variant_0": loss, "loss/variant_1": 3.0, "loss": loss}, 1)
    loss.fill_(1.0)
    records.note({"loss/variant_0": loss}, 2)
    records.note({"loss/variant_0": 0.5}, 2)
    assert records.curves == {0: {"loss": [(1, 2.0), (2, 0.5)]}, 1: {"loss": [(1, 3.0)]}}
    records.stopped(0, 2, "halved")
    records.note({"loss/variant_0": 0.1, "loss/variant_1": 1.0}, 3)
    again = VariantRecords([{}, {}], monitor=None, mode=None)
    again.note({"loss/variant_0": 9.0}, 1)
    again.load_state_dict(records.state_dict())
    assert again.curves == {0: {"loss": [(1, 2.0), (2, 0.5)]}, 1: {"loss": [(1, 3.0), (3, 1.0)]}}
