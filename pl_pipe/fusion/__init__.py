"""Horizontal fusion: variants of one model computed as one array."""

from pl_pipe.fusion.formulations import Chooser, Formulation, Preference, Site, Usual
from pl_pipe.fusion.report import Entry, FusionReport
from pl_pipe.fusion.timing import Timed
from pl_pipe.fusion.variant_array import VariantArray
from pl_pipe.tensors.arrays import FollowedStreams, OneStream, OwnStreams, Streams

__all__ = [
    "Chooser",
    "Entry",
    "FollowedStreams",
    "Formulation",
    "FusionReport",
    "OneStream",
    "OwnStreams",
    "Preference",
    "Site",
    "Streams",
    "Timed",
    "Usual",
    "VariantArray",
]
