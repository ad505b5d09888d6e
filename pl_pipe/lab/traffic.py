"""Traffic that is none of the training's: one TCP connection at a given pace. lab -> *traffic* -> links.

`python traffic.py receive ADDRESS PORT` on one host, which says when it listens; `… send ADDRESS PORT BITS_PER_SECOND`
on another. It imports nothing of the package, and so starts at once.
"""

import contextlib
import socket
import sys
import time

_PIECE_BYTES = 1 << 16
_RETRY_S = 0.1


def receive(address: str, port: int) -> None:
    """Takes in whatever comes, from one sender after another."""
    buffer = bytearray(1 << 20)
    with socket.create_server((address, port)) as server:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while connection.recv_into(buffer):
                    pass


def send(address: str, port: int, rate: float) -> None:
    """Sends at `rate` bits a second, less where the link gives less; a break is not made up for by a burst."""
    piece = bytes(_PIECE_BYTES)
    piece_s = 8 * _PIECE_BYTES / rate
    with _connected(address, port) as connection:
        due_s = time.monotonic()
        while True:
            connection.sendall(piece)
            now_s = time.monotonic()
            due_s = max(due_s + piece_s, now_s - piece_s)
            if due_s > now_s:
                time.sleep(due_s - now_s)


def _connected(address: str, port: int) -> socket.socket:
    """The first tries may be lost on the link."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout=None)
        time.sleep(_RETRY_S)


def main(arguments: list[str]) -> None:
    role, address, port, *rest = arguments
    with contextlib.suppress(KeyboardInterrupt):
        if role == "receive":
            receive(address, int(port))
        else:
            send(address, int(port), float(rest[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
