"""All ranks have the same value, or one error says which differ. strategies, policies -> *consensus* -> process group.

Only digests travel while all agree; what the values were is asked for when they differ.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.transport import CommunicationError

_DIGEST_BYTES = 16
_SHOWN = 80  # characters of a value


class ConsensusError(CommunicationError):
    """Ranks that must have the same value do not."""


@dataclass(frozen=True)
class Votes:
    """What the ranks had, by rank."""

    digests: tuple[bytes, ...]

    @property
    def agreed(self) -> bool:
        return len(set(self.digests)) == 1

    @property
    def differing(self) -> tuple[int, ...]:
        """Ranks that have another value than most; where two values are as frequent, than the lowest rank's."""
        counts = Counter(self.digests)
        most = max(counts.values())
        usual = next(digest for digest in self.digests if counts[digest] == most)
        return tuple(rank for rank, digest in enumerate(self.digests) if digest != usual)


class VotesToCome:
    """On their way from the other ranks."""

    def __init__(self, work: Any, everyone: Sequence[Tensor]) -> None:
        self._work, self._everyone = work, everyone

    def wait(self) -> Votes:
        self._work.wait()
        return Votes(tuple(bytes(one.tolist()) for one in self._everyone))


def ask_all(value: Any, *, group: Any = None) -> VotesToCome:
    """All ranks of the group must ask at the same point. Numbers, texts, tensors, arrays, and lists, sets and
    dicts of them; of anything else, what its `repr` tells."""
    mine = torch.frombuffer(bytearray(digest(value)), dtype=torch.uint8).to(_device_of(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    return VotesToCome(dist.all_gather(everyone, mine, group=group, async_op=True), everyone)


def consensus(value: Any, *, group: Any = None) -> Votes:
    """`ask_all`, and the answer."""
    return ask_all(value, group=group).wait()


def require_consensus(value: Any, *, what: str, remedy: str, group: Any = None) -> None:
    """Raises the same ConsensusError on every rank, which says who has what, where they differ."""
    votes = consensus(value, group=group)
    if votes.agreed:
        return
    shown: list[Any] = [None] * len(votes.digests)
    dist.all_gather_object(shown, _shown(value), group=group)
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(len(shown)))
    others = ", ".join(f"rank {ranks[place]} has {shown[place]}" for place in votes.differing)
    usual = next(place for place in range(len(shown)) if place not in votes.differing)
    raise ConsensusError(f"the ranks disagree on {what}: rank {ranks[usual]} has {shown[usual]}, {others}; {remedy}")


def _device_of(group: Any) -> torch.device:
    """Where messages must lie: a group of NCCL alone takes none from the host's memory."""
    is_nccl = dist.get_backend(group) == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def digest(value: Any) -> bytes:
    """Equal for equal values, bit for bit."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.digest()[:_DIGEST_BYTES]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(repr((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, numpy.ndarray):
        found.update(repr((value.dtype.str, value.shape)).encode())
        if value.dtype.hasobject:
            _feed(found, value.tolist())
        else:
            found.update(value.tobytes())
    elif isinstance(value, Mapping):
        found.update(f"{{{len(value)}:".encode())
        for key in sorted(value, key=repr):
            found.update(repr(key).encode() + b"=")
            _feed(found, value[key])
    elif isinstance(value, Set):
        found.update(b"set")
        _feed(found, sorted(map(repr, value)))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found.update(f"[{len(value)}:".encode())
        for one in value:
            _feed(found, one)
    else:
        found.update(repr(value).encode() + b";")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
