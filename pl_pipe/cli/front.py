"""From a command's tokens to a composed configuration: Hydra runs one job, or several under `-m`.

Lightning starts the other ranks of a run by repeating `sys.argv`. That is wrong for a sweep (each child would sweep
again and wait for peers that never come) and for a run directory chosen by the clock, so every job here rewrites
`sys.argv` to the command line of that one job, and puts the process back as it was when the job ends.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig, open_dict, read_write
from yaml import YAMLError

from pl_pipe.cli.launched import refuse_sweep, register_names
from pl_pipe.cli.messages import debugging, explain, print_error
from pl_pipe.cli.overrides import (
    config_flags,
    override_key,
    quoted,
    refuse_null_choices,
    with_free_names,
    without_outdated,
)
from pl_pipe.cli.run_directory import RunDirectory, resolve_checkpoint
from pl_pipe.cluster import Launch, detect_launch
from pl_pipe.config import register_configs, register_resolvers
from pl_pipe.errors import ConfigError, PlPipeError, RunError
from pl_pipe.log import get_logger, join_lightning, silence_noise

log = get_logger(__name__)


def run_command(command: str, arguments: list[str]) -> None:
    """Runs `command` (fit, validate, evaluate …) on Hydra's terms; exits with 1 if any job was refused."""
    launch = detect_launch(os.environ)
    prepare_hydra(command, launch)
    _import_from(str(Path.cwd()))  # a user's own package beside the command, as with `python -m`
    refuse_null_choices(arguments)
    arguments = with_free_names(arguments)
    on_run = _names_run_directory(arguments)
    if on_run:
        arguments = _on_run_directory(command, arguments)
    elif command == "fit":
        _refuse_used_directory(arguments)
    named = _named_directory(arguments)
    users_own = named is not None and named.exists()
    if launch is not None:
        refuse_sweep(launch, arguments)
    refused: list[PlPipeError] = []

    def job(cfg: DictConfig) -> None:
        from pl_pipe.cli.tasks import TASKS  # torch and Lightning: not needed for --help, --cfg and composition errors

        join_lightning()
        run = RunDirectory(Path(HydraConfig.get().runtime.output_dir))
        if on_run:
            _warn_of_changes(run, cfg)
        try:
            with _single_job(command, cfg, run, config_flags(arguments)):
                TASKS[command](cfg, run)
            if command == "evaluate" and not users_own:  # its files may all be elsewhere, under `out`
                run.discard_unless_used(command, with_parents=named is None)
        except (PlPipeError, InstantiationException) as error:
            if not users_own:
                run.discard_unless_used(command, with_parents=named is None)
            cause = _mendable(error)
            if cause is None or debugging():
                raise
            print_error(cause)
            refused.append(cause)

    sys.argv = [sys.argv[0], *arguments]
    with _one_voice():
        hydra.main(config_path="pkg://pl_pipe.conf", config_name="config", version_base="1.3")(job)()
    if refused:
        sys.exit(1)


def run_tool(command: str, arguments: list[str]) -> None:
    """Runs a command that trains nothing (plan, simulate, sweep, probe, data prepare) and keeps no run directory."""
    launch = detect_launch(os.environ)
    prepare_hydra(command, launch)
    _import_from(str(Path.cwd()))  # a user's own hooks and preparations
    refuse_null_choices(arguments)

    refused: list[PlPipeError] = []

    def job(cfg: DictConfig) -> None:
        try:
            with _one_voice():
                _run_tool(command, cfg)
        except PlPipeError as error:  # Hydra would add words of its own
            if debugging():
                raise
            refused.append(error)

    sys.argv = [sys.argv[0], *arguments]
    with _one_voice():
        hydra.main(config_path="pkg://pl_pipe.conf", config_name=command, version_base="1.3")(job)()
    if refused:
        raise refused[0]


def _run_tool(command: str, cfg: DictConfig) -> None:
    if command == "probe":
        from pl_pipe.cli.measuring import probe  # torch: no other tool waits for it

        probe(cfg)
    elif command == "prepare":
        from pl_pipe.cli.data import prepare_data

        prepare_data(cfg)
    else:
        from pl_pipe.cli.planning import TOOLS

        TOOLS[command](cfg)


def prepare_hydra(command: str, launch: Launch | None = None) -> None:
    """Registers schemas and resolvers, and sets how much is said."""
    register_configs()
    register_resolvers(launch)
    register_names(command, launch)
    # The library does not know the recipes; the application finds them where they are installed.
    importlib.import_module("pl_pipe.recipes.registry").register_configs()
    silence_noise()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them: see _one_voice


def _import_from(folder: str) -> None:
    """Makes a user's package importable, here and in the ranks this process starts."""
    sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = folder if not before else f"{folder}{os.pathsep}{before}"


@contextmanager
def _one_voice() -> Iterator[None]:
    """Errors of composition and of the file system, which a user can mend, as one message like any other."""
    try:
        yield
    except (CompactHydraException, YAMLError, OSError) as error:
        if debugging():
            raise
        raise ConfigError(explain(error)) from error


def _names_run_directory(arguments: list[str]) -> bool:
    """Whether the first token is a directory's name: neither a flag nor an override."""
    first = arguments[0] if arguments else "-"
    if first.startswith("~"):  # Hydra's deletion of a group
        return False
    return not first.startswith("-") and ("=" not in first or Path(first).is_dir())


def _warn_of_changes(run: RunDirectory, cfg: DictConfig) -> None:
    """The overrides are the run's own, but the defaults are those of the package installed now."""
    given = {override_key(token) for token in HydraConfig.get().overrides.task}
    for key, (then, now) in run.changed_since(cfg).items():
        if key not in given:
            log.warning("%s was %s in the run and is %s now: the defaults have changed since", key, then, now)


def _on_run_directory(command: str, arguments: list[str]) -> list[str]:
    """`validate RUN_DIR …` becomes that run's own overrides, its best checkpoint, and the overrides given now.

    `evaluate RUN_DIR` takes all of its checkpoints.
    """
    first = arguments[0]
    if command == "fit":
        raise RunError(
            f"fit takes overrides such as recipe=vgg16, got {first!r}; to go on from an earlier run, repeat its "
            f"overrides with ckpt_path=last"
        )
    run = RunDirectory.open(Path(first))
    _import_from(run.working_directory())
    recorded = without_outdated(run.overrides(), arguments[1:])
    recorded = [token for token in recorded if not token.startswith("ckpt_path=")]
    given = sorted(arguments[1:], key=lambda token: override_key(token) is None)  # Hydra wants flags at one end
    if not any(token.startswith("ckpt_path=") for token in given):
        wanted = run.path if command == "evaluate" else run.checkpoint("best")
        given.insert(0, quoted("ckpt_path", wanted))
    place = [quoted("hydra.run.dir", run.path), "hydra.output_subdir=null"]
    return [*run.config_flags(), *recorded, *place, *given]  # of two overrides of one thing, Hydra takes the later


def _refuse_used_directory(arguments: list[str]) -> None:
    """A second run in one directory would overwrite the first one's record, metrics and checkpoints."""
    if "LOCAL_RANK" in os.environ:
        return  # a rank of a run that was let through already, or of an outside launch that restarts
    folder = _named_directory(arguments)
    if folder is not None and (folder / ".hydra").is_dir():
        raise RunError(
            f"hydra.run.dir={folder} holds an earlier run; choose another directory (ckpt_path={folder} goes on "
            f"from that run in a new one)"
        )


def _named_directory(arguments: list[str]) -> Path | None:
    """The run directory that the user has named, if any."""
    values = [token.partition("=")[2] for token in arguments if token.startswith("hydra.run.dir=")]
    return Path(values[-1].strip("'\"")) if values else None


@contextmanager
def _single_job(command: str, cfg: DictConfig, run: RunDirectory, flags: list[str]) -> Iterator[None]:
    """One job's surroundings: the command line its children will repeat, and a clean process after it."""
    hydra_cfg: Any = HydraConfig.get()
    environment, argv = dict(os.environ), list(sys.argv)
    overrides = [token for token in hydra_cfg.overrides.task if not token.startswith("ckpt_path=")]
    checkpoint = resolve_checkpoint(cfg, run, keep_directory=command == "evaluate")
    if checkpoint is not None:
        cfg.ckpt_path = str(checkpoint)
        overrides.append(quoted("ckpt_path", checkpoint))
    with read_write(hydra_cfg), open_dict(hydra_cfg):
        hydra_cfg.run.dir = str(run.path)
    sys.argv = [argv[0], command, *flags, *overrides]
    try:
        yield
    finally:
        _leave_process_group()
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _mendable(error: BaseException | None) -> PlPipeError | None:
    """The error of ours behind `error`: Hydra wraps what a constructor raises."""
    while error is not None:
        if isinstance(error, PlPipeError):
            return error
        error = error.__cause__
    return None
