"""Sums over topologies: who sends what to whom, as data, and what runs it. KungFu, OSDI'20."""

from pl_pipe.comm.topology.adaptable import AdaptableSums, LinksToCome, SumGroups
from pl_pipe.comm.topology.choice import AUTO, NAMES, SPANNING_TREE, candidates, checked_setting, topology_of
from pl_pipe.comm.topology.mailbox import DistributedMailbox, LocalMailboxes, Mailbox
from pl_pipe.comm.topology.rounds import Piece, Round, Transfer, compile_rounds
from pl_pipe.comm.topology.shapes import SHAPES
from pl_pipe.comm.topology.spanning_tree import minimum_spanning_tree
from pl_pipe.comm.topology.summing import PIECE_BYTES, TopologySumming
from pl_pipe.comm.topology.traffic import LinkUse, TrafficWatch
from pl_pipe.comm.topology.trees import NATIVE, SumTree, Topology, checked_fathers

__all__ = [
    "AUTO",
    "NAMES",
    "NATIVE",
    "PIECE_BYTES",
    "SHAPES",
    "SPANNING_TREE",
    "AdaptableSums",
    "DistributedMailbox",
    "LinkUse",
    "LinksToCome",
    "LocalMailboxes",
    "Mailbox",
    "Piece",
    "Round",
    "SumGroups",
    "SumTree",
    "Topology",
    "TopologySumming",
    "TrafficWatch",
    "Transfer",
    "candidates",
    "checked_fathers",
    "checked_setting",
    "compile_rounds",
    "minimum_spanning_tree",
    "topology_of",
]
