"""Connects every two ranks by a socket of their own. process group -> *meeting* -> lifelines."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pl_pipe.log import get_logger

log = get_logger(__name__)

Gather = Callable[[Any], Sequence[Any]]
"""Gives every rank what all ranks passed, by rank."""


@dataclass(frozen=True)
class _Place:
    """Where a rank can be called."""

    host: str
    addresses: list[str]
    port: int
    token: str
    """Who answers with it is the rank, and not another host that has the same address."""


def connected(rank: int, gather: Gather, *, within_s: float) -> dict[int, socket.socket]:
    """Connections to all other ranks, by rank; one that cannot be had in time is left out, with a warning."""
    deadline_s = time.monotonic() + within_s
    with _listener() as listener:
        token = os.urandom(16).hex()
        mine = _Place(socket.gethostname(), _own_addresses(), listener.getsockname()[1], token)
        places = [_Place(**place) for place in gather(asdict(mine))]
        found: dict[int, socket.socket] = {}
        for other in range(rank):
            connection = _call(places[other], mine, rank, deadline_s)
            if connection is not None:
                found[other] = connection
        while len(found) < len(places) - 1 and time.monotonic() < deadline_s:
            answered = _answer(listener, token, deadline_s)
            if answered is not None:
                found[answered[0]] = answered[1]
    missing = sorted(set(range(len(places))) - {rank} - set(found))
    if missing:
        log.warning(
            "rank %d has no lifeline to ranks %s within %g s, so it will learn of their end late; let their hosts "
            "connect to each other on any port, as gloo needs it too",
            *(rank, missing, within_s),
        )
    return found


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be known to the system and still be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", 0), backlog=512)


def _own_addresses() -> list[str]:
    """Those that other hosts may reach this one at, the likeliest first."""
    found = []
    master = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(address)  # sends nothing, but chooses the interface
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))


def _call(place: _Place, mine: _Place, rank: int, deadline_s: float) -> socket.socket | None:
    same_host = ["127.0.0.1", "::1"] if place.host == mine.host else []
    for address in (*same_host, *place.addresses):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        try:
            connection = socket.create_connection((address, place.port), timeout=left_s if same_host else left_s / 2)
        except OSError:
            continue
        try:
            connection.sendall(json.dumps({"token": place.token, "rank": rank}).encode() + b"\n")
            if _line(connection) == place.token.encode():
                _prepare(connection)
                return connection
        except OSError:
            pass
        connection.close()
    return None


def _answer(listener: socket.socket, token: str, deadline_s: float) -> tuple[int, socket.socket] | None:
    listener.settimeout(max(0.01, deadline_s - time.monotonic()))
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    try:
        connection.settimeout(max(0.01, min(5.0, deadline_s - time.monotonic())))
        greeting = json.loads(_line(connection))
        if greeting["token"] == token:
            connection.sendall(token.encode() + b"\n")
            _prepare(connection)
            return int(greeting["rank"]), connection
    except (OSError, ValueError, KeyError, TypeError):
        pass  # whoever called, it was none of the ranks
    connection.close()
    return None


def _line(connection: socket.socket) -> bytes:
    """One short line, byte by byte: what follows it is not to be read yet."""
    found = b""
    while len(found) < 200:
        byte = connection.recv(1)
        if byte in (b"", b"\n"):
            break
        found += byte
    return found


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
