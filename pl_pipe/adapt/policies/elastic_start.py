"""How a run whose number of workers changes is started, and goes on. torchrun, checkpoint -> *start* -> policy."""

import os
from typing import Any

import lightning as L

from pl_pipe.errors import ConfigError


def require_elastic(trainer: L.Trainer, *, least: int, most: int) -> None:
    """Refuses a run whose workers nobody would start anew, or whose epochs would change with their number."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError(
            f"the number of workers can change under torchrun alone, and this run was not started by it; start it by "
            f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python -m pl_pipe.adapt.agent --nnodes {least}:{most} "
            f"--nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m pl_pipe fit hydra.run.dir=FOLDER …, "
            f"or in a lab by pl-pipe lab run"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            "torchrun's agents share their store, and one that comes later would wait for its address in vain; "
            "start them with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if processes != "1":
        raise ConfigError(
            f"this agent has {processes} workers (LOCAL_WORLD_SIZE), but they come and go one by one, each with an "
            f"agent of its own; start the agents with --nproc-per-node 1, or choose a lab with devices_per_host=1"
        )
    limit = trainer.limit_train_batches
    if limit != 1.0 or isinstance(limit, int):
        raise ConfigError(
            f"trainer.limit_train_batches={limit}: workers that come within an epoch count its batches anew, and would "
            f"train with more of them; set trainer.max_steps instead, or remove ElasticPolicy"
        )


def require_one_loader(trainer: L.Trainer) -> None:
    """The place in the epoch is one number; loaders of other lengths, or that begin again, have another place."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    number = len(combined.flattened)
    if number != 1:
        raise ConfigError(
            f"there are {number} training loaders, and the place in the epoch is kept of one alone: where the number "
            f"of workers changes, samples of the others would be lost; give one DataLoader, such as over a "
            f"StackDataset or a ConcatDataset, or remove ElasticPolicy"
        )


def begin_anew_with_the_rest(checkpoint: dict[str, Any]) -> bool:
    """To the loop, the rest of the epoch is one of its own: other ranks have other numbers of batches left.

    Whether there is a rest: a checkpoint may be that of the validation after the last batch.
    """
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    if batches["is_last_batch"] and batches["current"]["processed"] == batches["current"]["ready"]:
        return False
    batches["total"] = dict.fromkeys(batches["total"], batches["total"]["processed"])
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    return True
