"""What a lab's links give against what was declared: one TCP connection between two hosts, or inside one.

    sudo -E .venv/bin/python benchmarks/lab/rates.py

One process a side sends for some seconds with plain sockets; the receiver counts, without the first second.
"""

import argparse
import statistics
import subprocess
import sys

from pl_pipe.cluster import LabConfig, LinkConfig
from pl_pipe.cluster.link_text import parse_rate
from pl_pipe.lab import Lab

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
buffer, began_s, counted, seconds = bytearray(1 << 20), time.monotonic(), 0, float(sys.argv[2])
start_s = end_s = began_s + 1
while size := connection.recv_into(buffer):
    end_s = time.monotonic()
    if end_s > start_s:
        counted += size
print(8 * counted / (end_s - start_s), flush=True)
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
piece, end_s = bytes(1 << 20), time.monotonic() + 1 + float(sys.argv[2])
while time.monotonic() < end_s:
    connection.sendall(piece)
"""


def measured(lab: Lab, source: str, target: str, seconds: float) -> float:
    """Bits a second from one host to another."""
    address = lab.layout.address(target)
    receiver = lab.start(
        target, [sys.executable, "-c", RECEIVE, address, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    receiver.stdout.readline()
    lab.start(source, [sys.executable, "-c", SEND, address, str(seconds)]).wait()
    return float(receiver.stdout.readline())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=2.0)
    given = arguments.parse_args()
    print(f"{'link':10} {'declared':>9} {'measured':>9} {'share':>6}   range")
    for name in given.rates:
        for where in ("between", "inside"):
            link = LinkConfig(rate=name)
            config = LabConfig(hosts=2, **{where: link})
            with Lab(config) as lab:
                target = "host1" if where == "between" else "host0"
                found = [measured(lab, "host0", target, given.seconds) for _ in range(given.repeats)]
            middle = statistics.median(found)
            spread = f"{min(found) / 1e9:.3f} to {max(found) / 1e9:.3f} Gbit/s"
            print(f"{where:10} {name:>9} {middle / 1e9:9.3f} {middle / parse_rate(name, name='rate'):6.2f}   {spread}")


if __name__ == "__main__":
    main()
