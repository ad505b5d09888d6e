"""A port for a process that will listen on it in a moment."""

import random
import socket
from contextlib import suppress

_BELOW_OUTGOING = range(15_000, 32_000)
"""Outgoing connections are given ports from higher up, where one may be taken before it is listened on."""


def free_port() -> int:
    for port in random.SystemRandom().choices(_BELOW_OUTGOING, k=100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port among a hundred of {_BELOW_OUTGOING}")
