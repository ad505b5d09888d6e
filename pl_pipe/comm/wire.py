"""What a tensor looks like on its way: rounded to a narrower dtype, or as it is. exchange -> *Wire* -> Transport.

Activations and their gradients may be rounded, as PipeDream's own runtime did with fp16: cast before they are sent,
cast back when they have come. What must not lose a digit is sent `exact`: weights, and numbers that Python reads,
since a stage that saw other ones might take another branch than its neighbour.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pl_pipe.comm.transport import Message
from pl_pipe.tensors.ghosts import TensorSpec

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Wire:
    """Without a dtype, everything travels as it is."""

    dtype: torch.dtype | None = None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of this dtype is wider than the wire; integers and complex numbers have no narrower form."""
        return self.dtype is not None and dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize

    def spec(self, message: Message, spec: TensorSpec) -> TensorSpec:
        """Of what comes in the place of a tensor of `spec`."""
        if message.exact or not self.rounds(spec.dtype):
            return spec
        assert self.dtype is not None
        return spec._replace(dtype=self.dtype)

    def narrowed(self, message: Message, tensor: Tensor) -> Tensor:
        """What to send in the place of `tensor`."""
        if message.exact or not self.rounds(tensor.dtype):
            return tensor
        return tensor.to(self.dtype)
