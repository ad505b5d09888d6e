"""What carries a pipeline's messages, and several ranks on one device."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from pipedream_farm import Farm, Order

from pl_pipe.cli.hardware import count_devices, resolve_hardware
from pl_pipe.config import TrainerConfig
from pl_pipe.errors import ConfigError
from pl_pipe.strategies import PipeDreamStrategy
from pl_pipe.strategies.pipeline.devices import SharedCUDA, agreed_backend, chosen_backend
from pl_pipe.strategies.pipeline.plan import _memory_bytes

pytest_plugins = "pipedream_plugin"

CPU = torch.device("cpu")
ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "devices", "nccl", "expected"),
    [
        ("auto", [CPU, CPU], True, "gloo"),
        ("gloo", [CPU, CPU], True, "gloo"),
        ("auto", [ONE, OTHER], True, "nccl"),
        ("auto", [ONE], True, "nccl"),  # one device on each of several nodes
        ("auto", [ONE, OTHER], False, "gloo"),
        ("auto", [ONE, ONE], True, "gloo"),
        ("gloo", [ONE, OTHER], True, "gloo"),
        ("nccl", [ONE, OTHER], True, "nccl"),
    ],
)
def test_the_backend_follows_the_devices(
    backend: str, devices: list[torch.device], nccl: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert chosen_backend(backend, devices) == expected


@pytest.mark.parametrize(
    ("devices", "nccl", "reason"),
    [
        ([CPU], True, "this run is on cpu; set backend=gloo"),
        ([ONE, ONE], True, "several ranks share a device; set backend=gloo"),
        ([ONE, OTHER], False, "built without NCCL; set backend=gloo"),
    ],
)
def test_nccl_is_refused_where_it_cannot_work(
    devices: list[torch.device], nccl: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(ConfigError, match=reason):
        chosen_backend("nccl", devices)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"wire_dtype": "int8"}, "wire_dtype=int8 is unknown; choose bf16 or fp16"),
        ({"backend": "mpi"}, "backend=mpi is unknown; choose one of auto, gloo, nccl"),
        ({"backend": "nccl", "share_device": True}, "NCCL refuses; set backend=auto or gloo"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PipeDreamStrategy(**options)


def test_sharing_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    with pytest.raises(ConfigError, match=r"share_device=true, but torch sees no CUDA device here; leave it out"):
        PipeDreamStrategy(share_device=True)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with so many CUDA devices, as far as Lightning asks."""

    def present(count: int) -> None:
        monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: count > 0))
        monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: count))

    return present


@pytest.mark.parametrize(
    ("present", "asked", "expected"),
    [
        (1, 4, [0, 0, 0, 0]),
        (2, 4, [0, 0, 1, 1]),
        (2, 3, [0, 0, 1]),
        (4, 2, [0, 1]),
        (2, -1, [0, 1]),
        (2, "3", [0, 0, 1]),
        (2, [1, 1, 0], [1, 1, 0]),
        (2, "1,1,0", [1, 1, 0]),
    ],
)
def test_ranks_share_devices_with_their_neighbours(devices: Any, present: int, asked: Any, expected: list[int]) -> None:
    devices(present)
    assert SharedCUDA.parse_devices(asked) == expected


def test_a_device_that_is_not_there(devices: Any) -> None:
    devices(2)
    with pytest.raises(ConfigError, match=r"devices=\[0, 2\] names device 2, but this machine has 2"):
        SharedCUDA.parse_devices([0, 2])


def test_a_trainer_over_ranks_that_share_a_device(devices: Any) -> None:
    """Lightning itself refuses devices=[0, 0, 0, 0], and more devices than there are."""
    devices(1)
    trainer = L.Trainer(strategy=PipeDreamStrategy(share_device=True), devices=4, logger=False)
    assert trainer.strategy.parallel_devices == [ONE] * 4  # type: ignore[attr-defined]
    assert trainer.num_devices == 4
    assert isinstance(trainer.accelerator, SharedCUDA)


def test_the_command_line_counts_ranks() -> None:
    trainer = TrainerConfig(accelerator="cuda", devices=4)
    assert resolve_hardware(trainer, None, cuda_devices=1, share_device=True).devices == 4
    with pytest.raises(ConfigError, match="has 1 CUDA device"):
        resolve_hardware(trainer, None, cuda_devices=1)
    with pytest.raises(ConfigError, match="share_device=true, but this run is on cpu"):
        resolve_hardware(TrainerConfig(accelerator="cpu", devices=4), None, cuda_devices=1, share_device=True)


NCCL = Order(ranks=2, validation=False, split=True, strategy={"backend": "nccl"})


@pytest.mark.parametrize("order", [NCCL])
def test_nccl_on_cpu_is_refused_by_all_ranks(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert "backend=nccl, but this run is on cpu; set backend=gloo" in error


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([("nccl", "gpu-b")], "nccl"),
        ([("nccl", "gpu-a")], "gloo"),  # two hosts of a lab on one machine
        ([("gloo", "gpu-b")], "gloo"),
    ],
)
def test_all_nodes_take_the_same_backend(
    others: list[tuple[str, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(found: list[Any], own: Any) -> None:
        found[:] = [own, *others]

    for name, answer in {"is_nccl_available": True, "is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="gpu-a"))
    assert agreed_backend("auto", [ONE], ONE) == expected
    if expected == "gloo":
        with pytest.raises(ConfigError, match="several ranks share a device"):
            agreed_backend("nccl", [ONE], ONE)


def test_a_shared_device_has_a_part_of_its_memory_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80))
    strategy = SimpleNamespace(root_device=ONE, parallel_devices=[ONE, ONE, OTHER, OTHER])
    assert _memory_bytes(strategy) == 40


def test_a_device_may_be_named_several_times_where_it_is_shared() -> None:
    assert count_devices([0, 0, 1, 1], 2, repeated=True) == 4
    assert count_devices("0,0", 2, repeated=True) == 2
    with pytest.raises(ConfigError, match="is not a positive number"):
        count_devices([0, 0], 2)
