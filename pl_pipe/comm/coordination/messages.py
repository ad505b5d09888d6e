"""What workers and the coordinator say to each other: a line of JSON, and after it bytes that are not looked at."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pl_pipe.grouping import Group

REQUESTS = "requests"


def replies(worker: int) -> str:
    """The box of a worker."""
    return f"worker{worker}"


def packed(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = message.partition(b"\n")
    return json.loads(head), body


def group_as_json(group: Group) -> dict[str, Any]:
    return asdict(group)


def group_of_json(content: Mapping[str, Any]) -> Group:
    lists = {name: tuple(content[name]) for name in ("members", "iterations", "waited_s")}
    return Group(number=int(content["number"]), connects=bool(content["connects"]), **lists)


def joined(parts: Iterable[bytes]) -> tuple[list[int], bytes]:
    """Several bodies as one, and their lengths."""
    found = list(parts)
    return [len(part) for part in found], b"".join(found)


def divided(lengths: Iterable[int], body: bytes) -> list[bytes]:
    parts, start = [], 0
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts
