"""What each command that needs a recipe does with a composed configuration."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from rich.console import Console

from pl_pipe.adapt.policies import ElasticPolicy
from pl_pipe.callbacks.predictions import PredictionWriter
from pl_pipe.callbacks.run_summary import RunSummary
from pl_pipe.cli.assemble import (
    build_callbacks,
    build_data,
    build_delays,
    build_model,
    build_named,
    build_policies,
    build_trainer,
    hardware_of,
    loads_strictly,
    seed_all,
    use_network,
)
from pl_pipe.cli.evaluate import evaluate
from pl_pipe.cli.measuring import profile_recipe
from pl_pipe.cli.messages import rank_name, say
from pl_pipe.cli.processes import forget_processes, noted_process
from pl_pipe.cli.run_directory import RunDirectory, job_choices
from pl_pipe.cli.summary import describe_fit, fit_summary, write_json
from pl_pipe.errors import ConfigError, RunError
from pl_pipe.log import get_logger
from pl_pipe.runtime.checkpoint import check_fits, check_resumable, read_facts
from pl_pipe.strategies.fusion.fused_variants import FusedVariants
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher

log = get_logger(__name__)

_CHILD_EXIT_S = 30
_INTERRUPTED, _TERMINATED = 128 + 2, 128 + 15  # exit codes of processes ended by SIGINT and SIGTERM


def fit(cfg: DictConfig, run: RunDirectory) -> None:
    """Trains; leaves checkpoints, metrics and `summary.json` in the run's directory."""
    began = time.perf_counter()
    hardware = hardware_of(cfg)
    use_network(cfg)
    seed_all(cfg.seed)
    data, model = build_data(cfg), build_model(cfg)  # a missing folder is found before a large model is built
    policies = build_policies(cfg)
    for policy in policies:
        if isinstance(policy, ElasticPolicy) and policy.path.is_file():
            cfg.ckpt_path = str(policy.path)  # this run's own, by another number of workers
    if cfg.ckpt_path is not None:
        facts = read_facts(Path(cfg.ckpt_path), trusted=cfg.trust_checkpoint)
        if loads_strictly(model):
            check_fits(facts, model)
        check_resumable(facts)
        log.info("going on from step %d (epoch %d) of %s", facts.global_step, facts.epoch, facts.path)
    outcome = RunSummary(monitor=cfg.monitor, mode=cfg.monitor_mode)
    if rank_name() == "0":
        run.keep_earlier_metrics()
    loggers = build_named(cfg.logger, what="logger", expect=Logger)
    callbacks = [outcome, *build_callbacks(cfg, logs=bool(loggers)), *build_delays(cfg, hardware), *policies]
    trainer = build_trainer(cfg, hardware, callbacks=callbacks, logger=loggers or False, root=str(run.path))
    status = "failed"
    try:
        with noted_process(run), _children_end_with(trainer, run):
            trainer.fit(model, datamodule=data, **_checkpoint(cfg))
        status = "finished"
    except SIGTERMException:
        status = "stopped"
        sys.exit(_TERMINATED)
    except SystemExit:  # Lightning's answer to Ctrl-C
        status = "stopped"
        sys.exit(_INTERRUPTED)
    finally:
        if trainer.is_global_zero and outcome.record.own_steps:
            choices = job_choices()
            summary = fit_summary(
                outcome.record,
                status=status,
                choices={name: choices[name] for name in ("recipe", "data", "strategy")},
                hardware=asdict(hardware),
                wall_s=time.perf_counter() - began,
            )
            write_json(run.path / "summary.json", summary)
            if isinstance(trainer.strategy, FusedVariants):
                console = Console()
                console.print(trainer.strategy.leaderboard.table(console.width))
            say(describe_fit(summary, run.path))
    if trainer.is_global_zero and not outcome.record.own_steps:
        raise RunError(
            f"nothing was trained: the run starts at step {trainer.global_step}, and trainer.max_epochs="
            f"{cfg.trainer.max_epochs}, trainer.max_steps={cfg.trainer.max_steps} allow no more; raise them"
        )


def validate(cfg: DictConfig, run: RunDirectory) -> None:
    """Evaluates on validation data; leaves `validate.json`."""
    _evaluate(cfg, run, "validate")


def test(cfg: DictConfig, run: RunDirectory) -> None:
    """Evaluates on test data; leaves `test.json`."""
    _evaluate(cfg, run, "test")


def predict(cfg: DictConfig, run: RunDirectory) -> None:
    """Writes what `predict_step` returns, as `predictions.pt` or `predictions.csv`."""
    writer = PredictionWriter(run.path, cfg.predict.format)
    trainer, model, data = _prepare_evaluation(cfg, run, [writer])
    with noted_process(run), _children_end_with(trainer, run):
        trainer.predict(model, datamodule=data, return_predictions=False, **_checkpoint(cfg))
    if trainer.is_global_zero:
        say(f"predictions: {writer.path}")


def _evaluate(cfg: DictConfig, run: RunDirectory, command: str) -> None:
    trainer, model, data = _prepare_evaluation(cfg, run, [])
    with noted_process(run), _children_end_with(trainer, run):
        metrics = getattr(trainer, command)(model, datamodule=data, **_checkpoint(cfg))
    if trainer.is_global_zero:
        write_json(run.path / f"{command}.json", {"ckpt_path": cfg.ckpt_path, "metrics": metrics})
        say(f"{command}: {run.path / f'{command}.json'}")


def _prepare_evaluation(
    cfg: DictConfig, run: RunDirectory, callbacks: list[L.Callback]
) -> tuple[L.Trainer, L.LightningModule, L.LightningDataModule]:
    hardware = hardware_of(cfg)
    use_network(cfg)
    seed_all(cfg.seed)
    data, model = build_data(cfg), build_model(cfg)  # a missing folder is found before a large model is built
    if cfg.ckpt_path is None:
        log.warning("no ckpt_path: the model's weights are untrained; give ckpt_path=FILE or a run's directory")
    else:
        facts = read_facts(Path(cfg.ckpt_path), trusted=cfg.trust_checkpoint)
        if loads_strictly(model):
            check_fits(facts, model)
    callbacks = [*build_callbacks(cfg, logs=False), *callbacks]
    trainer = build_trainer(cfg, hardware, callbacks=callbacks, logger=False, root=str(run.path))
    return trainer, model, data


def _checkpoint(cfg: DictConfig) -> dict[str, Any]:
    """How Lightning is told what to load; `weights_only` is its word for refusing Python objects."""
    return {"ckpt_path": cfg.ckpt_path, "weights_only": not cfg.trust_checkpoint} if cfg.ckpt_path else {}


@contextmanager
def _children_end_with(trainer: L.Trainer, run: RunDirectory) -> Iterator[None]:
    """Lightning starts the other ranks and lets them go; here they have ended before the block is left."""
    try:
        yield
    except BaseException as error:
        if isinstance(trainer.strategy.launcher, PipelineLauncher):
            trainer.strategy.launcher.end_children()
        for child in _children(trainer):
            child.kill()
        if isinstance(error, MisconfigurationException):
            raise ConfigError(f"Lightning refuses this run: {error}") from error
        raise
    finally:
        for child in _children(trainer):
            try:
                child.wait(timeout=_CHILD_EXIT_S)
            except subprocess.TimeoutExpired:
                log.warning("process %d has not ended %d s after training; killing it", child.pid, _CHILD_EXIT_S)
                child.kill()
                child.wait()
        forget_processes(run, [child.pid for child in _children(trainer)])


def _children(trainer: L.Trainer) -> list[subprocess.Popen[bytes]]:
    return list(getattr(trainer.strategy.launcher, "procs", []))


TASKS: dict[str, Callable[[DictConfig, RunDirectory], Any]] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "predict": predict,
    "evaluate": evaluate,
    "profile": profile_recipe,
}
