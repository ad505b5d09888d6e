"""How many ranks read different data; the ranks of one pipeline read the same, and the first one reports."""

import lightning as L


def data_replicas(trainer: L.Trainer) -> int:
    return data_share(trainer)[0]


def data_share(trainer: L.Trainer | None) -> tuple[int, int]:
    """Among how many ranks the data is divided, and which of them this one is; without a trainer it is the only one."""
    kwargs = None if trainer is None else trainer.distributed_sampler_kwargs
    return (int(kwargs["num_replicas"]), int(kwargs["rank"])) if kwargs else (1, 0)
