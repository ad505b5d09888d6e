"""Rules for workers that train the same model: one port, many ways."""

from pl_pipe.comm.synchronizers.ad_psgd import ADPSGD, Event
from pl_pipe.comm.synchronizers.allreduce import AllReduce
from pl_pipe.comm.synchronizers.exchange import Averaging, Exchange
from pl_pipe.comm.synchronizers.local import Local
from pl_pipe.comm.synchronizers.matched import Matched
from pl_pipe.comm.synchronizers.pace import Pace
from pl_pipe.comm.synchronizers.pair import PairAveraging
from pl_pipe.comm.synchronizers.partial_reduce import PartialReduce
from pl_pipe.comm.synchronizers.port import StepFacts, Synchronizer, Worker
from pl_pipe.comm.synchronizers.reunion import Reunion, difference, digest
from pl_pipe.comm.synchronizers.sma import ModelAveraging
from pl_pipe.comm.synchronizers.wave import Wave

__all__ = [
    "ADPSGD",
    "AllReduce",
    "Averaging",
    "Event",
    "Exchange",
    "Local",
    "Matched",
    "ModelAveraging",
    "Pace",
    "PairAveraging",
    "PartialReduce",
    "Reunion",
    "StepFacts",
    "Synchronizer",
    "Wave",
    "Worker",
    "difference",
    "digest",
]
