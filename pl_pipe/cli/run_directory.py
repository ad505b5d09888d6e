"""A run's directory: what is where in it, and finding the checkpoint that `last` and `best` mean.

outputs/vgg16/2026-01-31_12-00-00-123456/
    .hydra/          the composed configuration and the overrides it came from
    fit.log          what the run said
    metrics.csv      everything logged
    checkpoints/     best.ckpt and last.ckpt
    processes/       ids of the run's processes, while they live
    summary.json     the outcome
"""

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pl_pipe.errors import CheckpointError, RunError
from pl_pipe.log import get_logger

log = get_logger(__name__)

RELATIVE = ("last", "best")


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run's directory."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The directory of an earlier run."""
        run = cls(path.resolve())
        if not path.is_dir():
            raise RunError(f"{path} is not a directory; give a run's directory, such as outputs/vgg16/<date>")
        for name in ("overrides.yaml", "hydra.yaml", "config.yaml"):
            if not (run._record / name).is_file():
                raise RunError(f"{path} is not a run's directory: it has no .hydra/{name}")
        return run

    @property
    def _record(self) -> Path:
        return self.path / ".hydra"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def processes(self) -> Path:
        return self.path / "processes"

    def overrides(self) -> list[str]:
        """The overrides the run was started with."""
        return [str(token) for token in OmegaConf.to_container(OmegaConf.load(self._record / "overrides.yaml")) or []]

    def changed_since(self, cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
        """Settings of the recipe and data that were otherwise in the run: the package's defaults have moved."""
        recorded: Any = OmegaConf.load(self._record / "config.yaml")
        changed: dict[str, tuple[Any, Any]] = {}
        for group, choice in zip(("recipe", "data"), self.trained(), strict=True):
            if choice == job_choices()[group]:
                old, new = _flat(recorded[group], group), _flat(cfg[group], group)
                changed |= {key: (old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)}
        return changed

    def _runtime(self) -> Any:
        return OmegaConf.load(self._record / "hydra.yaml").hydra.runtime

    def working_directory(self) -> str:
        """Where the run was started: a user's own package may lie there."""
        return str(self._runtime().cwd)

    def config_flags(self) -> list[str]:
        """`--config-dir` as it was given to the run."""
        sources = self._runtime().config_sources
        folders = [source.path for source in sources if source.provider == "command-line"]
        return [f"--config-dir={folders[0]}"] if folders else []

    def trained(self) -> tuple[str, str]:
        """The names of the recipe and data set."""
        choices = self._runtime().choices
        return str(choices.recipe), str(choices.data)

    def checkpoint(self, which: str) -> Path:
        """The file of the `best` or `last` checkpoint; a run without validation has a last one only."""
        for name in (which, "last"):
            file = self.checkpoints / f"{name}.ckpt"
            if file.is_file():
                if name != which:
                    log.warning("%s has no %s.ckpt; using %s.ckpt", self.path, which, name)
                return file
        raise CheckpointError(f"{self.path} holds no checkpoint; the run ended before it saved one")

    def keep_earlier_metrics(self) -> None:
        """A job that its launcher restarts writes into the same directory; the logger would delete what is there."""
        metrics = self.path / "metrics.csv"
        if metrics.is_file():
            number = len(list(self.path.glob("metrics_*.csv")))
            metrics.rename(self.path / f"metrics_{number}.csv")

    def discard_unless_used(self, command: str, *, with_parents: bool) -> None:
        """Removes the directory if nothing is in it but Hydra's own record; on wish, empty parents too."""
        mine = re.compile(rf"\.hydra|processes|hparams\.yaml|({command}(_rank\d+)?|train_ddp_process_\d+)\.log")
        if self.path.is_dir() and all(mine.fullmatch(entry.name) for entry in self.path.iterdir()):
            shutil.rmtree(self.path, ignore_errors=True)  # another rank may be at it too
            for parent in (self.path.parent, self.path.parent.parent) if with_parents else ():
                with contextlib.suppress(OSError):  # not empty: other runs live there
                    parent.rmdir()


def _flat(node: Any, prefix: str) -> dict[str, Any]:
    """`{"recipe.lr": 0.1, …}` without interpolations' results and without the `about` block."""
    content: Any = OmegaConf.to_container(node, resolve=False)
    return {f"{prefix}.{key}": value for key, value in content.items() if key != "about"}


def job_choices() -> dict[str, str]:
    """The option chosen from each group, in the job that runs now."""
    return {str(group): str(option) for group, option in HydraConfig.get().runtime.choices.items()}


def resolve_checkpoint(cfg: DictConfig, run: RunDirectory, *, keep_directory: bool = False) -> Path | None:
    """The file `cfg.ckpt_path` means, or None where none was asked for.

    `last` and `best` look into this run's own directory first (a run resumed in place), then for the newest earlier
    run of the same recipe and data under `output_root`. A run's directory is its last checkpoint, unless the command
    has a use for all of them.
    """
    wanted = cfg.ckpt_path
    if wanted is None:
        return None
    if wanted not in RELATIVE:
        path = Path(wanted).expanduser().resolve()
        if path.is_dir():
            return path if keep_directory else RunDirectory.open(path).checkpoint("last")
        if not path.is_file():
            raise CheckpointError(f"ckpt_path={wanted} does not exist; it takes last, best or a checkpoint file")
        return path
    own = run.checkpoints / f"{wanted}.ckpt"
    if own.is_file():
        return own
    choices = job_choices()
    trained = (choices["recipe"], choices["data"])
    root = Path(cfg.output_root)
    found = [
        file
        for file in root.rglob(f"checkpoints/{wanted}.ckpt")
        if (file.parents[1] / ".hydra" / "hydra.yaml").is_file() and RunDirectory(file.parents[1]).trained() == trained
    ]
    if not found:
        raise CheckpointError(
            f"ckpt_path={wanted}, but no run of recipe={trained[0]} data={trained[1]} under {root} has saved one; "
            f"give ckpt_path=<file>, or start without it"
        )
    newest = max(found, key=lambda file: file.stat().st_mtime).resolve()
    log.info("ckpt_path=%s is %s", wanted, newest)
    return newest
