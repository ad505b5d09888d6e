"""What is to run in a lab: the command behind `--`, checked before anything is set up. argv -> *program* -> lab."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from pl_pipe.adapt.provisioning import Provisioning, parse_schedule
from pl_pipe.cli.front import prepare_hydra
from pl_pipe.cli.hardware import count_devices
from pl_pipe.cli.launched import refuse_sweep
from pl_pipe.cli.messages import explain
from pl_pipe.cli.overrides import config_flags, override_key, quoted, refuse_null_choices
from pl_pipe.cli.tables import choices
from pl_pipe.cluster import Launch, RehearsedCluster
from pl_pipe.errors import ConfigError
from pl_pipe.graph import read_graph
from pl_pipe.planning_config import LabRoot
from pl_pipe.strategies.requirements import Hardware, StrategyAbout, check_requirements

COMMANDS = ("fit", "validate", "test", "predict", "probe")
"""Those that torchrun can start on several hosts."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


@dataclass(frozen=True)
class LabSettings:
    """A lab to set up, and where its hosts' output goes."""

    cluster: RehearsedCluster
    output_root: Path


def check_behind_dashes(given: Sequence[str] | None) -> list[str]:
    """The command, if there is one: without `--` its tokens would be taken for the lab's."""
    if not given:
        raise ConfigError(
            "there is no command to run in the lab; put one behind --, such as pl-pipe lab run cluster=lab_4x1_1gbit "
            "-- fit recipe=vgg16 strategy=pipedream"
        )
    return list(given)


def lab_settings(arguments: Sequence[str]) -> LabSettings:
    """From tokens such as `cluster=lab_4x1_1gbit cluster.lab.spectators=1 --config-dir mine`."""
    flags = config_flags(list(arguments))
    for token in arguments:
        if token not in flags and override_key(token) is None:
            raise ConfigError(f"{token!r} is no setting of a lab; give overrides such as cluster=lab_4x1_1gbit")
    refuse_null_choices(arguments)
    with _composing(arguments, "lab") as search:
        config = OmegaConf.to_object(compose("lab", [*search, *_overrides(arguments)]))
        assert isinstance(config, LabRoot)
        if config.cluster.lab is None:
            known = [name for name in choices("cluster") if name.startswith("lab_")]
            chosen = [token for token in arguments if override_key(token) == "cluster"]
            raise ConfigError(
                f"{chosen[-1] if chosen else 'cluster=local'} describes no lab; choose cluster=NAME of "
                f"{', '.join(known)}, or a file of your own that has lab: (docs/lab.md)"
            )
    return LabSettings(RehearsedCluster.of(config.cluster.lab), Path(config.output_root))


def program_of(given: Sequence[str], lab: RehearsedCluster, lab_arguments: Sequence[str]) -> list[str]:
    """What torchrun starts on each host: a command of pl-pipe's, or a Python program of the user's."""
    is_python = _PYTHON.fullmatch(Path(given[0]).name) is not None
    if is_python or given[0].endswith(".py"):
        return _own_program(given[1:] if is_python and len(given) > 1 else given)
    return ["-m", "pl_pipe", *trained_command(given, lab, lab_arguments)]


def _own_program(given: Sequence[str]) -> list[str]:
    """`train.py …` or `-m package …`."""
    if given[0] == "-m" and len(given) > 1:
        return list(given)
    if not given[0].endswith(".py"):
        raise ConfigError(
            f"{given[0]!r} is no Python program; give python train.py or python -m package behind --, with its "
            f"arguments (pl-pipe lab exec runs any program on one host)"
        )
    if not Path(given[0]).is_file():
        raise ConfigError(f"{given[0]} does not exist here; give the path of a Python program behind --")
    return list(given)


def trained_command(given: Sequence[str], lab: RehearsedCluster, lab_arguments: Sequence[str]) -> list[str]:
    """The command that each host runs: with the lab as its cluster, unless it names another."""
    command, *arguments = given
    if command not in COMMANDS:
        raise ConfigError(
            f"{command!r} cannot run in a lab; give one of {', '.join(COMMANDS)} behind --, or python train.py "
            f"(pl-pipe lab exec runs any program on one host)"
        )
    launch = Launch("torchrun", "lab", 0, lab.devices_per_host, len(lab.hosts))
    refuse_sweep(launch, list(arguments))
    if not any(override_key(token) == "cluster" for token in arguments):
        own = [token for token in lab_arguments if (override_key(token) or "").split(".")[0] == "cluster"]
        arguments = [*arguments, *own]
    if not config_flags(arguments):
        arguments = [*arguments, *config_flags(list(lab_arguments))]
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("-", "~")):  # else a run's directory
        _check(command, arguments, launch)
    return [command, *arguments]


def _check(command: str, arguments: Sequence[str], launch: Launch) -> None:
    """Composes the command's configuration once, here: else every host would refuse it by itself."""
    refuse_null_choices(arguments)
    with _composing(arguments, command, launch) as search:
        name = "probe" if command == "probe" else "config"
        config = compose(name, [*search, *_overrides(arguments)], return_hydra_config=True)
        trainer = config.trainer
        devices = count_devices(trainer.devices, None) if trainer.devices != "auto" else launch.local_world_size
        if (devices, trainer.num_nodes) != (launch.local_world_size, launch.num_nodes):
            raise ConfigError(
                f"trainer.devices={trainer.devices} trainer.num_nodes={trainer.num_nodes}, but the lab has "
                f"{launch.num_nodes} host(s) of {launch.local_world_size} device(s); leave both settings out, or "
                f"choose another lab"
            )
        if command != "probe":
            _check_strategy(config, launch)
            _check_files(config)


def _check_strategy(config: DictConfig, launch: Launch) -> None:
    about: Any = OmegaConf.merge(OmegaConf.structured(StrategyAbout), config.strategy.get("about") or {})
    wanted = config.trainer.accelerator
    hardware = Hardware(
        about.accelerators[0] if wanted == "auto" else "cuda" if wanted == "gpu" else wanted,
        launch.local_world_size,
        launch.num_nodes,
    )
    check_requirements(
        config.hydra.runtime.choices.strategy, about, hardware, fewer="choose a lab of one host with one device"
    )


def _check_files(config: DictConfig) -> None:
    """Those that every host would look for in vain. A recipe's own profile may be none, which only the recipe knows."""
    plan = config.strategy.get("plan")
    if isinstance(plan, str) and plan.endswith(".json") and not Path(plan).expanduser().is_file():
        raise ConfigError(f"strategy.plan={plan} does not exist; give a file of pl-pipe plan, auto or straight")
    if "profile" not in config.recipe:
        return
    profile = config.recipe.profile
    if profile is None:
        raise ConfigError(
            "recipe.profile is not set; give the profile to rehearse, a graph.txt of PipeDream's or a profile.json of "
            "pl-pipe profile"
        )
    if not Path(str(profile)).expanduser().is_file():
        raise ConfigError(f"recipe.profile={profile} is no file; give a graph.txt or a profile.json")
    if config.hydra.runtime.choices.recipe == "recorded":
        read_graph(Path(str(profile)).expanduser())


def with_run_folder(program: Sequence[str], folder: Path) -> list[str]:
    """The command with a run directory, the same for hosts that begin at different times."""
    if any(override_key(token) == "hydra.run.dir" for token in program):
        return list(program)
    return [*program, quoted("hydra.run.dir", folder.resolve())]


def elastic_limits(program: Sequence[str], lab: RehearsedCluster) -> tuple[int, int, int] | None:
    """The least and the most hosts of a command whose policy changes their number, and with how many it begins."""
    *module, name = program[:3]
    arguments = program[3:]
    if module != ["-m", "pl_pipe"] or name != "fit":
        return None
    with _composing(arguments, name, Launch("torchrun", "lab", 0, 1, 1)) as search:
        config = compose("config", [*search, *_overrides(arguments)])
        policies = [entry for entry in (config.policy or {}).values() if entry is not None]
        elastic = [entry for entry in policies if str(entry.get("_target_")).endswith("ElasticPolicy")]
    if not elastic:
        return None
    least, most, hosts = int(elastic[0].least), int(elastic[0].most), len(lab.hosts)
    if lab.devices_per_host != 1:
        raise ConfigError(
            f"the policy adds and removes workers one by one, and the lab's hosts have {lab.devices_per_host} devices "
            f"each, which come and go together; choose a lab with devices_per_host=1"
        )
    if most > hosts:
        raise ConfigError(f"the policy wants up to {most} workers, the lab has {hosts} host(s); set most={hosts}")
    Provisioning(least=least, most=most)  # refuses limits that contradict each other
    given = elastic[0].get("schedule")
    schedule = parse_schedule(given if isinstance(given, str) else list(given)) if given else []
    beyond = [size for size, _ in schedule if not least <= size <= most]
    if beyond:
        raise ConfigError(
            f"the schedule has {beyond[0]} worker(s), and the limits are {least} to {most}; change either"
        )
    return least, most, schedule[0][0] if schedule else least


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [token for token in arguments if override_key(token) is not None or token.startswith("~")]


@contextmanager
def _composing(arguments: Sequence[str], command: str, launch: Launch | None = None) -> Iterator[list[str]]:
    """Hydra ready to compose; gives the overrides that add the user's folder. Its refusals are ours."""
    prepare_hydra(command, launch)
    flags = config_flags(list(arguments))
    folder = flags[-1].split("=", 1)[-1] if flags else None
    search = []
    if folder is not None:
        path = quoted("path", f"file://{Path(folder).resolve()}").removeprefix("path=")
        search = [f"hydra.searchpath=[{path}]"]
    try:
        with initialize_config_module("pl_pipe.conf", version_base="1.3"):
            yield search
    except (CompactHydraException, YAMLError) as error:
        raise ConfigError(explain(error)) from error
