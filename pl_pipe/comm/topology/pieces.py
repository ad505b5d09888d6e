"""One rank's part in one sum. rounds -> *PieceSum* -> Mailbox.

Sums are added up in the order of the program, whatever comes first: the same numbers give the same bits. Halves (fp16,
bf16) are added up in float32 on each rank, and rounded once for the way.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from pl_pipe.comm.summing import Pending
from pl_pipe.comm.topology.mailbox import Mailbox
from pl_pipe.comm.topology.rounds import Piece, Program, Transfer

_AHEAD_PIECES = 8
"""Receives that are asked for before their turn: a message moves when both sides have asked for it."""
_NARROW = (torch.float16, torch.bfloat16)

Tag = Callable[[Transfer], int]


class SpareBuffers:
    """Memory for pieces that are to be added, used again and again."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer as large as a piece, and the memory to give back."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.nbytes < like.nbytes:
            memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return memory[: like.nbytes].view(like.dtype), memory

    def give_back(self, memory: Tensor) -> None:
        self._spare.append(memory)


class PieceSum:
    """Runs a program on a flat tensor of the host."""

    def __init__(self, flat: Tensor, program: Program, mailbox: Mailbox, buffers: SpareBuffers, tag: Tag) -> None:
        self._flat, self._program, self._mailbox, self._buffers, self._tag = flat, program, mailbox, buffers, tag
        self._unasked = deque(transfer for turn in program for transfer in turn.receives)
        self._asked: dict[int, tuple[Pending, Tensor, Tensor | None]] = {}
        self._wide: dict[Piece, Tensor] = {}

    def run(self) -> None:
        """Returns when the tensor has the sum and may be used."""
        sent: list[Pending] = []
        self._ask()
        for turn in self._program:
            for transfer in turn.sends:
                part = self._rounded(transfer.piece)
                sent.append(self._mailbox.send(part, transfer.peer, self._tag(transfer)))
            for transfer in turn.receives:
                self._take(transfer)
        for message in sent:
            message.wait()

    def _ask(self) -> None:
        while self._unasked and len(self._asked) < _AHEAD_PIECES:
            transfer = self._unasked.popleft()
            # What comes down needs what this rank sent up, so nothing of it is under way when its place is taken.
            buffer, memory = self._part(transfer.piece), None
            if transfer.adds:
                buffer, memory = self._buffers.take(buffer)
            message = self._mailbox.receive(buffer, transfer.peer, self._tag(transfer))
            self._asked[transfer.number] = message, buffer, memory

    def _take(self, transfer: Transfer) -> None:
        message, buffer, memory = self._asked.pop(transfer.number)
        message.wait()
        self._ask()
        if memory is not None:
            self._add(transfer.piece, buffer)
            self._buffers.give_back(memory)

    def _part(self, piece: Piece) -> Tensor:
        return self._flat[piece.start : piece.stop]

    def _add(self, piece: Piece, buffer: Tensor) -> None:
        if self._flat.dtype not in _NARROW:
            self._part(piece).add_(buffer)
        elif piece in self._wide:
            self._wide[piece] += buffer
        else:
            self._wide[piece] = self._part(piece).float() + buffer

    def _rounded(self, piece: Piece) -> Tensor:
        wide = self._wide.pop(piece, None)
        return self._part(piece) if wide is None else self._part(piece).copy_(wide)
