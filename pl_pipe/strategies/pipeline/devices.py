"""Devices of a pipeline's ranks, and what carries messages between them. settings -> *devices* -> transport.

device of a rank     backend=auto is    because
cpu                  gloo
cuda, its own        nccl
cuda, shared         gloo               NCCL takes one rank a device; messages go through pinned memory of the host
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from typing_extensions import override

from pl_pipe.comm import WIRE_DTYPES
from pl_pipe.errors import ConfigError

BACKENDS = ("auto", "gloo", "nccl")


def check_transfers(*, wire_dtype: str | None, backend: str, share_device: bool) -> None:
    """Refuses options that mean nothing, whatever the machine."""
    if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
        raise ConfigError(f"wire_dtype={wire_dtype} is unknown; choose {' or '.join(WIRE_DTYPES)}, or leave it out")
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend} is unknown; choose one of {', '.join(BACKENDS)}")
    if share_device and backend == "nccl":
        raise ConfigError(
            "backend=nccl, but share_device=true puts several ranks on one device, which NCCL refuses; set "
            "backend=auto or gloo, or a device for each rank"
        )


def chosen_backend(backend: str, devices: Sequence[torch.device]) -> str:
    """What carries the messages between ranks on these devices of a node, one each."""
    kind = devices[0].type
    is_shared = kind != "cpu" and len(set(devices)) < len(devices)
    if backend == "auto":
        return "nccl" if kind == "cuda" and not is_shared and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and kind != "cuda":
        raise ConfigError(f"backend=nccl, but this run is on {kind}; set backend=gloo, or accelerator=cuda")
    if backend == "nccl" and is_shared:
        raise ConfigError("backend=nccl, but several ranks share a device; set backend=gloo, or a device for each rank")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError("backend=nccl, but this torch was built without NCCL; set backend=gloo")
    return backend


def agreed_backend(backend: str, devices: Sequence[torch.device], device: torch.device) -> str:
    """The same on all ranks, which call it at the same point: hosts may lie on one machine, and share its devices.

    Args:
        devices: of the ranks of this node, of which `device` is this rank's.
    """
    own = chosen_backend(backend, devices)
    if device.type != "cuda" or not dist.is_initialized():
        return own
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, str(torch.cuda.get_device_properties(device).uuid)))
    backends, used = zip(*everyone, strict=True)
    if set(backends) == {"nccl"} and len(set(used)) == len(used):
        return "nccl"
    if backend == "nccl":
        raise ConfigError("backend=nccl, but several ranks share a device; set backend=gloo, or a device for each rank")
    return "gloo"


class SharedCUDA(CUDAAccelerator):
    """As many ranks as `devices` says, on the CUDA devices that there are: neighbours in the pipeline share one."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        """A number of ranks; or the device of each, where one may stand several times."""
        present = CUDAAccelerator.auto_device_count()
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        if isinstance(devices, int):
            ranks = present if devices == -1 else devices
            return [rank * min(present, ranks) // ranks for rank in range(ranks)]
        beyond = [index for index in devices if not 0 <= index < present]
        if beyond:
            raise ConfigError(f"devices={list(devices)} names device {beyond[0]}, but this machine has {present}")
        return list(devices)

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]


def shared_accelerator(accelerator: Any) -> Any:
    """The accelerator of a strategy with `share_device`, where none is given."""
    if accelerator is not None:
        return accelerator
    if not SharedCUDA.is_available():
        raise ConfigError(
            "share_device=true, but torch sees no CUDA device here; leave it out: processes share the CPU anyway"
        )
    return SharedCUDA()
