"""Lightning's own launcher leaves the survivors of a killed worker alone; in processes that import everything anew."""

from pathlib import Path

import pytest
from test_pipedream_launched import launched


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["partial_reduce", "ad_psgd"])
def test_three_of_four_workers_finish(tmp_path: Path, strategy: str) -> None:
    code, text = launched(tmp_path, strategy, script="launched_uneven.py")
    assert code == 0, text[-3000:]
    assert text.count("finished epoch 3") == 3, text[-3000:]
    assert "rank 2 is gone: its process ended without a word; training goes on with 3 worker(s)" in text
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {f"epoch={epoch}.ckpt" for epoch in range(3)}
