"""What `trainer.accelerator` and `trainer.devices` mean on this machine, checked before anything starts."""

import re
from typing import Any

from pl_pipe.cluster import Launch
from pl_pipe.config import TrainerConfig
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.requirements import Hardware

_CUDA = ("cuda", "gpu")


def resolve_hardware(
    trainer: TrainerConfig,
    launch: Launch | None,
    *,
    cuda_devices: int,
    managed: bool = False,
    share_device: bool = False,
) -> Hardware:
    """The accelerator and process counts that `trainer` asks for; `cuda_devices` is what the machine has.

    `managed` says that the user has set Lightning's own variables (`NODE_RANK`, `MASTER_ADDR`) on every node by hand;
    `share_device` that several processes may use one CUDA device.
    """
    if trainer.num_nodes < 1:
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes} is too small; the least is 1")
    if trainer.num_nodes > 1 and launch is None and not managed:
        raise ConfigError(
            f"trainer.num_nodes={trainer.num_nodes}, but nothing has started this run on other nodes, so it would wait "
            f"for them for ever; start it with torchrun or srun on every node (docs/cluster.md)"
        )
    accelerator = _accelerator(trainer.accelerator, cuda_devices)
    available = cuda_devices if accelerator == "cuda" else None
    devices = count_devices(trainer.devices, available, repeated=share_device)
    if share_device and available is None:
        raise ConfigError(
            "strategy.share_device=true, but this run is on cpu, which processes share anyway; leave it out, or set "
            "trainer.accelerator=cuda"
        )
    if available is not None and devices > available and not share_device:
        raise ConfigError(
            f"trainer.devices={trainer.devices}, but this machine has {available} CUDA device(s); "
            f"set trainer.devices={available} or trainer.accelerator=cpu"
        )
    if launch is not None and (devices, trainer.num_nodes) != (launch.local_world_size, launch.num_nodes):
        raise ConfigError(
            f"trainer.devices={devices} trainer.num_nodes={trainer.num_nodes}, but {launch.launcher} started "
            f"{launch.local_world_size} process(es) on each of {launch.num_nodes} node(s); leave both settings out"
        )
    return Hardware(accelerator=accelerator, devices=devices, num_nodes=trainer.num_nodes)


def _accelerator(name: str, cuda_devices: int) -> str:
    if name in _CUDA and cuda_devices == 0:
        raise ConfigError(
            f"trainer.accelerator={name}, but torch sees no CUDA device here; set trainer.accelerator=cpu, "
            f"or install a CUDA build of torch"
        )
    if name == "auto":
        return "cuda" if cuda_devices else "cpu"
    if name not in ("cpu", *_CUDA):
        raise ConfigError(f"trainer.accelerator={name} is not supported; choose one of auto, cpu, cuda")
    return "cuda" if name in _CUDA else "cpu"


def count_devices(devices: Any, available: int | None, *, repeated: bool = False) -> int:
    """How many processes `trainer.devices` asks for: a number, a list of indices, `auto` or -1 for all.

    With `repeated`, a device may stand in the list several times.
    """
    wrong = ConfigError(
        f"trainer.devices={devices!r} is not a positive number, a list of device indices, or auto; "
        f"set for example trainer.devices=4"
    )
    if isinstance(devices, bool) or devices is None:
        raise wrong
    if isinstance(devices, str):
        text = devices.strip()
        if text == "auto":
            return available or 1
        if "," in text:
            named = [part.strip() for part in text.split(",") if part.strip()]
            return count_devices(named, available, repeated=repeated)
        if not re.fullmatch(r"-?\d+", text):
            raise wrong
        devices = int(text)
    if isinstance(devices, int):
        if devices == -1 and available is not None:
            return available
        if devices < 1:
            raise wrong
        return devices
    if isinstance(devices, list | tuple) and devices and available is None:
        raise ConfigError(
            f"trainer.devices={list(devices)} names devices, but CPU processes are only counted; "
            f"set trainer.devices={len(devices)}"
        )
    if isinstance(devices, list | tuple) and devices:
        indices = [str(index) for index in devices]
        if not all(index.isdigit() for index in indices) or (len(set(indices)) != len(indices) and not repeated):
            raise wrong
        beyond = [index for index in indices if available is not None and int(index) >= available]
        if beyond:
            raise ConfigError(
                f"trainer.devices={list(devices)} names device {beyond[0]}, but this machine has {available}; "
                f"indices start at 0"
            )
        return len(indices)
    raise wrong
