"""`strategy="partial_reduce"`: a worker averages with those that are ready at about the same time."""

from typing import Any

from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy


class PartialReduceStrategy(DataParallelStrategy):
    """Data parallelism with partial reduce (SIGMOD'21, VLDB'23): nobody waits for the slowest worker."""

    def __init__(self, synchronizer: str = "partial_reduce", **options: Any) -> None:
        """
        Args:
            options: `every` (updates between two averagings); `averaging` (constant or dynamic), `alpha`;
                `first_wait_s`, `longest_wait_s`, `group_size`, `connect_every`, `pairs_above` say how groups form;
                `on_fault` (leave or stop), `timeout_s`.
        """
        super().__init__(synchronizer, **options)
