"""Fusion over two ranks equals Lightning's data parallelism, variant by variant."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import TIMEOUT_S, child_environment

SCRIPT = Path(__file__).with_name("fused_ranks.py")


@pytest.mark.slow
def test_fusion_over_ranks_equals_data_parallel_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        kept = torch.load(tmp_path / f"rank{rank}.pt")
        for number, (fused, alone) in enumerate(zip(kept["fused"], kept["alone"], strict=True)):
            for name, value in alone.items():
                if rank == 0 or "running" not in name:  # which other ranks have of their own, until they are told
                    assert (fused[name].double() - value.double()).abs().max() <= 1e-9, (rank, number, name)
            for name, value in kept["metrics"][number].items():
                assert abs(kept["fused_metrics"][f"{name}/variant_{number}"] - value) <= 1e-9, name
