"""Clusters: levels, places, costs, and their file."""

import json
from pathlib import Path

import pytest

from pl_pipe.cluster import Cluster, Level, read_cluster
from pl_pipe.errors import ConfigError

TWO_LEVELS = Cluster((Level(4, 1e10, 1e-5), Level(2, 1e9, 1e-4, 2.5)))


def test_ranks_meet_at_the_innermost_level_that_joins_them() -> None:
    assert TWO_LEVELS.workers == 8
    assert [TWO_LEVELS.group_size(level) for level in (0, 1)] == [4, 8]
    assert TWO_LEVELS.meeting_level([0, 3]) == 0
    assert TWO_LEVELS.meeting_level([3, 4]) == 1
    assert TWO_LEVELS.link(4, 7) == TWO_LEVELS.levels[0]
    with pytest.raises(ConfigError, match=r"ranks \[0, 8\] are not all in a cluster of 8 workers"):
        TWO_LEVELS.meeting_level([0, 8])


def test_costs() -> None:
    link = Level(4, 1e9, 1e-3)
    assert link.all_reduce_s(1e6, 1) == 0.0
    assert link.all_reduce_s(1e6, 4) == pytest.approx(6e-3 + 2 * 0.75 * 1e-3)
    assert Level(4, 1e9, 0.0, 3.0).all_reduce_s(1e6, 4) == pytest.approx(3 * 0.75 * 1e-3)


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({**TWO_LEVELS.as_json(), "note": "for readers"}))
    assert read_cluster(tmp_path / "cluster.json") == TWO_LEVELS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a cluster file of schema 1"),
        ('{"schema": 2, "levels": []}', "schema: 2"),
        ('{"schema": 1}', "a level that cannot be read"),
        ('{"schema": 1, "levels": []}', "no levels"),
        ('{"schema": 1, "levels": [{"members": 2}]}', "a level that cannot be read"),
        ('{"schema": 1, "levels": [{"members": 2, "bandwidth": -1}]}', "bandwidth -1"),
        ('{"schema": 1, "levels": [{"members": 2, "bandwidth": "fast"}]}', "a level that cannot be read"),
        ('{"schema": 1, "levels": [{"members": 2.7, "bandwidth": 1e9}]}', "joins 2.7 members"),
        ('{"schema": 1, "levels": [{"members": Infinity, "bandwidth": 1e9}]}', "joins inf members"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(tmp_path / "cluster.json")
