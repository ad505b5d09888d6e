"""`strategy="hetpipe"`: waves of steps, a parameter server, and a bound on how far workers are apart."""

from typing import Any

from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy


class HetPipeStrategy(DataParallelStrategy):
    """HetPipe's wave-synchronous parallelism (ATC'20) among workers of one device each."""

    def __init__(self, synchronizer: str = "wave", **options: Any) -> None:
        """
        Args:
            options: `wave` (steps in one), `distance` (waves that a worker may be ahead), `servers`; `timeout_s`.
        """
        super().__init__(synchronizer, **options)
