"""Numbers on their way from a device that is not waited for until somebody needs them. device -> *numbers* -> host."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LateNumbers:
    """To read a number of a GPU is to wait for all that was asked of it before, and then it waits for the host.

    So the copies are asked for as well, and read when there is a reason to: by then they have long arrived.
    """

    def __init__(self, values: Sequence[Tensor | float | int]) -> None:
        self._numbers = [0.0] * len(values)
        self._coming: list[tuple[list[int], Tensor, torch.Event]] = []
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.is_cuda:
                alike.setdefault((value.device, value.dtype), []).append((place, value))
            else:
                self._numbers[place] = float(value)
        for (device, dtype), numbers in alike.items():
            together = torch.stack([number.detach().reshape(()) for _, number in numbers])
            host = torch.empty(len(numbers), dtype=dtype, pin_memory=True)
            host.copy_(together, non_blocking=True)
            arrived = torch.Event(device)
            arrived.record(torch.cuda.current_stream(device))
            self._coming.append(([place for place, _ in numbers], host, arrived))

    @property
    def have_arrived(self) -> bool:
        return all(arrived.query() for _, _, arrived in self._coming)

    def read(self) -> list[float]:
        for places, host, arrived in self._coming:
            arrived.synchronize()
            for place, number in zip(places, host.tolist(), strict=True):
                self._numbers[place] = float(number)
        self._coming.clear()
        return self._numbers
