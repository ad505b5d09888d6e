"""Modes under which a step of plain PyTorch runs: recorded, ghost and array tensors."""
