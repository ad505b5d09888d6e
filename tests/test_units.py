"""Numbers as people read them."""

import pytest

from pl_pipe.units import format_count, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (75.2, "1 min 15 s"), (7322, "2 h 2 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (139.5, "139.5"), (1500, "1.5 k"), (138_357_544, "138.4 M"), (2e9, "2.0 G")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text
