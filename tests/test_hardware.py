"""What a run asks of the machine, and what is refused."""

from typing import Any

import pytest

from pl_pipe.cli.hardware import count_devices, resolve_hardware
from pl_pipe.cluster import ClusterConfig, Launch, detect_launch, network_environment
from pl_pipe.config import TrainerConfig
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.requirements import Hardware, StrategyAbout, check_requirements

TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_JOB_ID": "9", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "t"}


@pytest.mark.parametrize(
    ("devices", "available", "expected"),
    [
        (4, None, 4),
        ("4", None, 4),
        ("auto", None, 1),
        ("auto", 3, 3),
        (-1, 3, 3),
        ("-1", 3, 3),
        ([0, 2], 3, 2),
        ("0,2", 3, 2),
    ],
)
def test_devices_are_counted(devices: Any, available: int | None, expected: int) -> None:
    assert count_devices(devices, available) == expected


@pytest.mark.parametrize("devices", ["four", "", "--4", 0, -2, -1, True, None, [], 1.5, {}])
def test_what_is_no_number_of_devices_is_refused(devices: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not a positive number, a list of device indices, or auto"):
        count_devices(devices, None)


def test_lists_of_devices() -> None:
    for wrong in ([0, 0], ["a"]):
        with pytest.raises(ConfigError, match="is not a positive number, a list of device indices"):
            count_devices(wrong, 4)
    with pytest.raises(
        ConfigError, match=r"\[0, 1\] names devices, but CPU processes are only counted; set .*devices=2"
    ):
        count_devices([0, 1], None)


def test_nodes_that_nobody_started_are_refused() -> None:
    trainer = TrainerConfig(devices=1, num_nodes=2)
    with pytest.raises(ConfigError, match=r"num_nodes=2, but nothing has started this run on other nodes"):
        resolve_hardware(trainer, None, cuda_devices=0)
    assert resolve_hardware(trainer, None, cuda_devices=0, managed=True).world_size == 2


def test_more_devices_than_the_machine_has() -> None:
    trainer = TrainerConfig(accelerator="cuda", devices=8)
    with pytest.raises(ConfigError, match=r"devices=8, but this machine has 2 CUDA device\(s\); set trainer.devices=2"):
        resolve_hardware(trainer, None, cuda_devices=2)
    with pytest.raises(ConfigError, match=r"names device 2, but this machine has 2"):
        resolve_hardware(TrainerConfig(accelerator="gpu", devices=[1, 2]), None, cuda_devices=2)
    assert resolve_hardware(TrainerConfig(accelerator="cpu", devices=8), None, cuda_devices=2).devices == 8


def test_accelerators() -> None:
    def chosen(name: str, cuda: int) -> str:
        return resolve_hardware(TrainerConfig(accelerator=name, devices=1), None, cuda_devices=cuda).accelerator

    assert [chosen("auto", 0), chosen("auto", 1), chosen("gpu", 1), chosen("cpu", 1)] == ["cpu", "cuda", "cuda", "cpu"]
    with pytest.raises(ConfigError, match=r"accelerator=cuda, but torch sees no CUDA device here"):
        chosen("cuda", 0)
    with pytest.raises(ConfigError, match=r"accelerator=abacus is not supported; choose one of auto, cpu, cuda"):
        chosen("abacus", 0)


def test_launchers_are_read() -> None:
    assert detect_launch({}) is None
    torchrun = detect_launch(TORCHRUN)
    assert torchrun == Launch("torchrun", "job", rank=5, local_world_size=4, num_nodes=2)
    assert torchrun.world_size == 8
    assert detect_launch(SLURM) == Launch("slurm", "9", rank=3, local_world_size=3, num_nodes=2)
    assert detect_launch(SLURM | {"SLURM_JOB_NAME": "bash"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": "7"}, "give every node the same --nproc-per-node"),
        (SLURM | {"SLURM_NTASKS": "5"}, "ask for --ntasks-per-node"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "LOCAL_WORLD_SIZE is None, not a number"),
    ],
)
def test_odd_launches_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environment)


def test_settings_that_contradict_the_launcher_are_refused() -> None:
    launch = detect_launch(TORCHRUN)
    assert resolve_hardware(TrainerConfig(devices=4, num_nodes=2), launch, cuda_devices=0).world_size == 8
    with pytest.raises(ConfigError, match=r"torchrun started 4 process\(es\) on each of 2 node\(s\); leave both"):
        resolve_hardware(TrainerConfig(devices=2, num_nodes=2), launch, cuda_devices=0)


def test_strategies_demands() -> None:
    one_cpu, four = Hardware("cpu", 1), Hardware("cpu", 4)
    check_requirements("ddp", StrategyAbout(), four)
    with pytest.raises(ConfigError, match=r"strategy=fsdp runs on cuda, this run is on cpu; set trainer.accelerator"):
        check_requirements("fsdp", StrategyAbout(accelerators=["cuda"]), one_cpu)
    with pytest.raises(ConfigError, match=r"strategy=single trains on 1 device, .* \(strategy=ddp, strategy=pip"):
        check_requirements("single", StrategyAbout(max_devices=1), four)
    with pytest.raises(ConfigError, match=r"on each of 2 node"):
        check_requirements("single", StrategyAbout(max_devices=1), Hardware("cpu", 1, num_nodes=2))


def test_network_interface() -> None:
    assert network_environment(ClusterConfig(), {}) == {}
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert network_environment(ClusterConfig(interface="lo"), {}) == wanted
    assert network_environment(ClusterConfig(interface="lo"), {"GLOO_SOCKET_IFNAME": "eth7"}) == {
        "NCCL_SOCKET_IFNAME": "lo"
    }
    with pytest.raises(ConfigError, match=r"cluster.interface=nosuch0 is not a network interface .* choose one of"):
        network_environment(ClusterConfig(interface="nosuch0"), {})
