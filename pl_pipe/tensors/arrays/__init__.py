"""Array tensors: one run of the user's Python computes M variants; each tensor holds the values of all of them."""

from pl_pipe.tensors.arrays.marks import Rule, is_array, mark, mark_all, shared
from pl_pipe.tensors.arrays.mode import ArrayMode, Notes
from pl_pipe.tensors.arrays.streams import FollowedStreams, OneStream, OwnStreams, Streams

__all__ = [
    "ArrayMode",
    "FollowedStreams",
    "Notes",
    "OneStream",
    "OwnStreams",
    "Rule",
    "Streams",
    "is_array",
    "mark",
    "mark_all",
    "shared",
]
