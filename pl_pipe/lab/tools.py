"""`ip` and `tc`, and whether this machine lets us use them. namespaces -> *tools* -> kernel."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from pl_pipe.errors import LabError

_TIMEOUT_S = 30
_UNKNOWN = ("qdisc kind is unknown", "Unknown qdisc")
_FAILED_LINE = re.compile(r"Command failed -:(\d+)")
_FORBIDDEN = ("Operation not permitted", "Permission denied")


def unavailable() -> str | None:
    """Why this machine cannot have labs, with the remedy; None where nothing is known against it."""
    if not sys.platform.startswith("linux"):
        return f"a lab is made of Linux's network namespaces, and this is {sys.platform}; use a Linux machine"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a lab needs the command {missing[0]}, which is not here; install iproute2 (apt install iproute2)"
    if os.geteuid() != 0:
        return (
            f"a lab makes network namespaces, which only root may (user id {os.geteuid()}); "
            f"run sudo -E {shutil.which('pl-pipe') or 'pl-pipe'} lab …"
        )
    return None


def check_machine() -> None:
    reason = unavailable()
    if reason is not None:
        raise LabError(reason)


def run(*command: str) -> str:
    """Runs one command and gives what it printed."""
    return _run(command, None)


def run_batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Runs lines of `ip` or `tc` inside a namespace, as one process."""
    if lines:
        _run((tool, "-n", namespace, "-batch", "-"), "\n".join(lines) + "\n")


def _run(command: Sequence[str], text: str | None) -> str:
    # In a session of its own: Ctrl-C must not end the removal of a lab half-way.
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(
            f"{' '.join(command)} has not ended within {_TIMEOUT_S:g} s and was killed; look what holds up the "
            f"kernel's network settings (dmesg), or leave the machine more idle"
        ) from error
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())
    what = " ".join(command)
    if text is not None and (line := _FAILED_LINE.search(said)):
        what = f"{' '.join(command[:3])} {text.splitlines()[int(line[1]) - 1]}"
    if any(words in said for words in _UNKNOWN) and "netem" in (text or ""):
        raise LabError(
            "latency and loss of a link are netem's, which this kernel has not; load it (modprobe sch_netem, from the "
            "package linux-modules-extra or kernel-modules-extra), or leave latency and loss out"
        )
    if any(words in said for words in _FORBIDDEN):
        raise LabError(
            f"{what} is not permitted here ({said}); a lab needs CAP_NET_ADMIN and CAP_SYS_ADMIN, in a "
            f"container docker run --privileged"
        )
    raise LabError(
        f"{what} failed ({said}); a lab needs iproute2 of 5.0 or newer, and a kernel with veth, bridge and tbf"
    )
