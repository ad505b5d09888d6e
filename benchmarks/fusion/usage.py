"""How busy the GPU is and how much memory is taken, sampled by NVML while something is timed."""

import threading
from typing import Any

import torch

_EVERY_S = 0.02


class Usage:
    """From its making to `stop`."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._ends = threading.Event()
        self._nvml: Any = None
        self._thread: threading.Thread | None = None
        if not torch.cuda.is_available():
            return
        try:
            import pynvml
        except ImportError:
            return
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Mean utilisation in per cent, and GiB in use: by the card, or by torch where NVML is not there."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if not torch.cuda.is_available():
            return {}
        taken = {"torch_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}
        if not self._samples:
            return taken
        busy, used = zip(*self._samples, strict=True)
        return {**taken, "gpu_percent": round(sum(busy) / len(busy), 1), "card_gib": round(max(used), 2)}

    def _watch(self) -> None:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        while not self._ends.wait(_EVERY_S):
            busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            self._samples.append((busy, self._nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30))
