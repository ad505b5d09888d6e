"""Numbers as people read them."""

import pytest

from pl_pipe.units import format_bytes, format_count, format_duration, format_seconds


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (553_430_176, "553.4 MB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB")],
)
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-8, "25 ns"), (1.5e-6, "1.5 µs"), (0.00215, "2.15 ms"), (1.0, "1 s"), (673.2, "673 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
