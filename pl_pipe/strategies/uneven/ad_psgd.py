"""`strategy="ad_psgd"`: a worker averages with one other, chosen by chance, while both compute."""

from typing import Any

from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy


class ADPSGDStrategy(DataParallelStrategy):
    """Asynchronous decentralized parallel SGD (ICML'18)."""

    def __init__(self, synchronizer: str = "ad_psgd", **options: Any) -> None:
        """
        Args:
            options: `every` (steps of which the last begins an averaging); `matching` pairs all workers anew each time,
                which makes them wait for each other; `seed`, `on_fault` (leave or stop), `timeout_s`.
        """
        super().__init__(synchronizer, **options)
