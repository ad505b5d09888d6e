"""Processes for the pipeline's benchmarks: all run one function, and Lightning finds its rank in the environment.

    answers = run_ranks(function, stages, argument, …)      # answers[rank]

Ranks are forked from a server that has imported Lightning already, so that a run begins within a second.
"""

import multiprocessing
import os
import queue
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["lightning", "torchvision", "torch.distributed.pipelining", "pl_pipe.strategies"]


def prepare(**environment: str) -> None:
    """To be called first in `main`: one thread a process, here and in every rank."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **environment)
    os.environ["PYTHONSAFEPATH"] = "1"  # the server must import the same pl_pipe as this script, wherever it is run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # an exception, so that ranks are ended too
    torch.set_num_threads(1)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout_s: float = 240.0) -> list[Any]:
    """What `function(*arguments)` returned on each rank."""
    port = _free_port()
    answers: Any = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_rank, args=(rank, ranks, port, answers, function, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            rank, answer, error = answers.get(timeout=timeout_s)
            if error is not None:
                raise RuntimeError(f"rank {rank} of {ranks} failed:\n{error}")
            found[rank] = answer
        for process in processes:
            process.join(20)
    except queue.Empty:
        missing = sorted(set(range(ranks)) - set(found))
        raise RuntimeError(f"ranks {missing} of {ranks} gave no answer within {timeout_s:g} s") from None
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(ranks)]


def busy() -> str:
    """How much this machine has to do besides: to be printed with the numbers."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    return f"load average {load:.1f} over the last minute on {cores} cores"


def _rank(rank: int, ranks: int, port: int, answers: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # gloo greets every peer there
    os.dup2(nowhere, 2)  # what matters is returned, errors too
    torch.set_num_threads(1)
    answer, error = None, None
    try:
        answer = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    answers.put((rank, answer, error))


def _free_port() -> int:
    """Below those that outgoing connections are given, one of which may be taken before a rank listens on it."""
    for port in random.SystemRandom().choices(range(15_000, 32_000), k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port among a hundred between 15000 and 32000")
