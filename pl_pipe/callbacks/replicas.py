"""How many ranks read different data; the ranks of one pipeline read the same, and the first one reports."""

import lightning as L


def data_replicas(trainer: L.Trainer) -> int:
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1
