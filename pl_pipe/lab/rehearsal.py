"""One launcher a host, their output together, and one exit code. lab -> *rehearsal* -> user.

host0: torchrun --node-rank 0 ─┬─ rank 0        the rendezvous is on host0; ranks are numbered by host
                               └─ rank 1
host1: torchrun --node-rank 1 ─┬─ rank 2
                               └─ rank 3
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.adapt.provisioner import VARIABLE
from pl_pipe.lab.agents import ENVIRONMENT, Agents, elastic_launcher
from pl_pipe.lab.consequences import ended
from pl_pipe.lab.lab import Lab
from pl_pipe.lab.layout import INTERFACE
from pl_pipe.lab.output import copy_output

RENDEZVOUS_PORT = 29500
_POLL_S = 0.1
_OTHERS_END_WITHIN_S = 30.0
"""After a host has failed: time for the others to say what they have seen of it."""
_STOP_WITHIN_S = 20.0
"""After Ctrl-C: time for the ranks to end their batch together and save."""

Say = Callable[[str], None]


def launcher(lab: Lab, host: str, program: Sequence[str]) -> list[str]:
    """torchrun's command line on one host; with a static rendezvous nodes have the numbers they are given.

    Args:
        program: as torchrun takes it: `train.py …` or `-m package …`.
    """
    hosts = lab.hosts
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(hosts)), "--node-rank", str(hosts.index(host))),
        *("--nproc-per-node", str(lab.devices_per_host)),
        *("--master-addr", lab.layout.address(hosts[0]), "--master-port", str(RENDEZVOUS_PORT)),
        *("--rdzv-id", lab.name, *program),
    ]


def host_environment(lab: Lab, host: str, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """What makes the ranks of a host speak over its link: they would find each other on one machine else."""
    ranks = len(lab.hosts) * lab.devices_per_host
    found = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": f"{lab.name}-{host}",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    return found


def rehearse(lab: Lab, program: Sequence[str], *, folder: Path, say: Say) -> int:
    """Runs a program on all hosts, `train.py …` or `-m package …`; the exit code is the first failing host's, or 0.

    Each line is said with its host's name, and kept in the host's file in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    started: dict[str, subprocess.Popen[Any]] = {}
    readers: list[threading.Thread] = []
    stopping = threading.Event()
    width = max(len(host) for host in lab.hosts)
    try:
        for host in lab.hosts:
            started[host] = lab.start(
                host,
                launcher(lab, host, program),
                environment=host_environment(lab, host, os.environ, cores=cores),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        for host, process in started.items():  # only now: a process that is forked among threads may hang
            arguments = (process.stdout, folder / f"{host}.log", f"{host:{width}} | ", say, stopping)
            readers.append(threading.Thread(target=copy_output, args=arguments, daemon=True))
            readers[-1].start()
        return _wait(started, say)
    except BaseException:
        stopping.set()
        _stop(started, say)
        raise
    finally:
        for reader in readers:
            reader.join(1.0)


def rehearse_elastically(
    lab: Lab, program: Sequence[str], *, limits: tuple[int, int], first: int, folder: Path, say: Say
) -> int:
    """Runs `-m pl_pipe fit …` on the first hosts, and then on as many as it asks for; the exit code is the same as
    that of `rehearse`. Hosts come at different times: the program must say where its results go."""
    folder.mkdir(parents=True, exist_ok=True)
    cores, readers, stopping = len(os.sched_getaffinity(0)), list[threading.Thread](), threading.Event()
    requests = folder.resolve() / "workers.json"
    endpoint = f"{lab.layout.address(lab.hosts[0])}:{RENDEZVOUS_PORT}"
    begun: dict[str, int] = {}

    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        host = lab.hosts[place]
        begun[host] = begun.get(host, 0) + 1
        command = elastic_launcher(
            list(program),
            least=limits[0],
            most=limits[1],
            endpoint=endpoint,
            run=lab.name,
            address=lab.layout.address(host),
            is_first=place == 0,
        )
        environment = host_environment(lab, host, os.environ, cores=cores)
        process = lab.start(
            host,
            [sys.executable, *command],
            environment={**environment, **ENVIRONMENT, VARIABLE: str(requests), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        file = folder / (f"{host}.log" if begun[host] == 1 else f"{host}_{begun[host]}.log")
        readers.append(
            threading.Thread(target=copy_output, args=(process.stdout, file, f"{host} | ", say, stopping), daemon=True)
        )
        readers[-1].start()
        return process

    try:
        return Agents(start, requests, say=say).serve(first, most=limits[1])
    finally:
        stopping.set()
        for reader in readers:
            reader.join(1.0)


def _wait(started: Mapping[str, subprocess.Popen[Any]], say: Say) -> int:
    """Until all have ended, or one has failed and the others had their time."""
    failed: tuple[str, int] | None = None
    deadline_s = float("inf")
    while any(process.poll() is None for process in started.values()):
        if failed is None:
            failed = _first_failure(started)
            left = [host for host, process in started.items() if process.poll() is None]
            if failed is not None:
                deadline_s = time.monotonic() + _OTHERS_END_WITHIN_S
                if left:
                    grace = f"ending in {_OTHERS_END_WITHIN_S:g} s unless they do so before: {', '.join(left)}"
                    say(f"{failed[0]}'s launcher {ended(failed[1])}; {grace}")
        if time.monotonic() > deadline_s:
            left = [host for host, process in started.items() if process.poll() is None]
            say(f"{failed[0] if failed else ''} failed {_OTHERS_END_WITHIN_S:g} s ago; ending {', '.join(left)}")
            _ask_to_end(started)
            _wait_for(started, 5.0)
            break
        time.sleep(_POLL_S)
    failed = failed or _first_failure(started)
    if failed is None:
        return 0
    code = failed[1]
    return code if code > 0 else 128 - code  # a negative one is a signal's


def _first_failure(started: Mapping[str, subprocess.Popen[Any]]) -> tuple[str, int] | None:
    return next(((host, process.returncode) for host, process in started.items() if process.poll()), None)


def _stop(started: Mapping[str, subprocess.Popen[Any]], say: Say) -> None:
    """torchrun passes the request on; ranks end at a batch they agree on. A second Ctrl-C does not wait for them.

    They are asked before a word is said: that may fail, where the terminal has gone.
    """
    if any(process.poll() is None for process in started.values()):
        _ask_to_end(started)
        say("stopping; once more kills")
        _wait_for(started, _STOP_WITHIN_S)


def _ask_to_end(started: Mapping[str, subprocess.Popen[Any]]) -> None:
    for process in started.values():
        process.terminate()


def _wait_for(started: Mapping[str, subprocess.Popen[Any]], seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while any(process.poll() is None for process in started.values()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
