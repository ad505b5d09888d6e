"""Decisions among uneven workers: who averages with whom, how much each counts, who may be ahead. No torch."""

from pl_pipe.grouping.clocks import WaveClocks, check_distance
from pl_pipe.grouping.former import Group, GroupFormer, GroupRules, RecentGroups
from pl_pipe.grouping.matching import matchings
from pl_pipe.grouping.weights import ALPHA, AVERAGING, check_averaging, weights

__all__ = [
    "ALPHA",
    "AVERAGING",
    "Group",
    "GroupFormer",
    "GroupRules",
    "RecentGroups",
    "WaveClocks",
    "check_averaging",
    "check_distance",
    "matchings",
    "weights",
]
