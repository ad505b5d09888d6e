"""How long a lab takes to set up and to remove, and that many of them leave nothing behind.

    sudo -E .venv/bin/python benchmarks/lab/cycles.py --hosts 4 --cycles 50

Every other cycle has processes in it (traffic, and a program that does not end when asked) and a changed link.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pl_pipe.cluster import LabConfig, LinkConfig
from pl_pipe.lab import Lab, state, traffic

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hosts", type=int, default=4)
    arguments.add_argument("--cycles", type=int, default=50)
    given = arguments.parse_args()
    before = surroundings()
    up_s, down_s = [], []
    for cycle in range(given.cycles):
        lab = Lab(LabConfig(hosts=given.hosts, between=LinkConfig(rate="1gbit"), inside=LinkConfig(rate="10gbit")))
        began_s = time.perf_counter()
        with lab:
            up_s.append(time.perf_counter() - began_s)
            if cycle % 2:
                lab.set_link("host0", LinkConfig(rate="100mbit"))
                lab.set_traffic("host0", "host1", "50mbit")
                lab.start("host1", [sys.executable, "-c", STUBBORN])
                time.sleep(0.3)
                began_s = time.perf_counter()
                lab.down(grace_s=0.5)
            else:
                began_s = time.perf_counter()
        down_s.append(time.perf_counter() - began_s)
    for name, times in (("set-up", up_s), ("removal", down_s)):
        print(f"{name}: median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f} s")
    after = surroundings()
    left = changes(before, after)
    print(f"{given.cycles} cycles of {given.hosts} hosts; left behind: {left or 'nothing'}")
    sys.exit(1 if left else 0)


def surroundings() -> dict[str, set[str]]:
    """Namespaces, devices, queues and routes of the machine, its labs' files, and Python processes."""
    found = {name: set(run(*command).splitlines()) for name, command in COMMANDS.items()}
    found["files"] = {str(path) for path in state.folder().glob("*")}
    found["processes"] = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(traffic.__file__) in words or STUBBORN in words:
            found["processes"].add(words)
    return found


COMMANDS = {
    "namespaces": ("ip", "netns", "list"),
    "devices": ("ip", "-br", "link"),
    "queues": ("tc", "qdisc"),
    "routes": ("ip", "route"),
}


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def changes(before: dict[str, set[str]], after: dict[str, set[str]]) -> str:
    return "; ".join(f"{name}: {before[name] ^ after[name]}" for name in before if before[name] != after[name])


if __name__ == "__main__":
    main()
