"""Modes under which a step of plain PyTorch runs: recorded, ghost and array tensors."""

from pl_pipe.tensors.recorder import LayerWatch, Recorder, refuse_lazy
from pl_pipe.tensors.recording import Recording

__all__ = ["LayerWatch", "Recorder", "Recording", "refuse_lazy"]
