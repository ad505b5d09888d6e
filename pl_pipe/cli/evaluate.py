"""`pl-pipe evaluate`: what a model is worth by its task's own measure. checkpoints -> *evaluate* -> report/scores.

Loss and token accuracy are what `validate` and `test` log. A translation's BLEU or a question's exact match needs more
than a step: a search, text made of tokens, files in an official format. A recipe names the class that does it in the
configuration group `evaluation`; here each checkpoint is loaded and handed to it.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from rich.console import Console

from pl_pipe.cli.assemble import build, build_data, build_model, loads_strictly, seed_all, trainer_settings
from pl_pipe.cli.hardware import resolve_hardware
from pl_pipe.cli.messages import say
from pl_pipe.cli.outputs import written_together
from pl_pipe.cli.run_directory import RunDirectory, job_choices
from pl_pipe.cluster import detect_launch
from pl_pipe.errors import CheckpointError, ConfigError
from pl_pipe.log import get_logger
from pl_pipe.report.scores import Score, draw_scores, score_table, write_scores
from pl_pipe.runtime.checkpoint import CheckpointFacts, check_fits, read_facts

log = get_logger(__name__)

_ALIASES = ("best", "last")


class Evaluation(Protocol):
    """What a recipe's `evaluation._target_` builds. Metrics are better when larger."""

    title: str
    """Heads the table and the picture."""
    main_metric: str
    """The metric that is drawn, one of those returned."""

    def __call__(self, model: L.LightningModule, datamodule: L.LightningDataModule, out: Path) -> dict[str, float]:
        """The metrics of `model`, which is in evaluation mode on its device; files go under `out`, which exists.

        The data module has been set up for `test`.
        """


def evaluate(cfg: DictConfig, run: RunDirectory) -> None:
    """Scores a checkpoint, or each of a directory; leaves `evaluation.csv`, the evaluation's files and a picture."""
    launch = detect_launch(os.environ)
    if launch is not None and launch.world_size > 1:
        raise ConfigError(
            f"evaluate runs in one process, but {launch.launcher} started {launch.world_size}; start pl-pipe by itself"
        )
    seed_all(cfg.seed)
    evaluation = _build_evaluation(cfg)
    device = _device(cfg)
    if cfg.ckpt_path is None:
        raise ConfigError("evaluate needs trained weights; give a run's directory, or ckpt_path=<file or directory>")
    found = _checkpoints(Path(cfg.ckpt_path), trusted=cfg.trust_checkpoint)
    data, model = build_data(cfg), build_model(cfg)
    if is_overridden("configure_model", model):
        model.configure_model()
    if loads_strictly(model):
        for facts in found:  # a foreign one is refused before hours are spent on the others
            check_fits(facts, model)
    out = run.path / "evaluation" if cfg.out is None else Path(cfg.out).expanduser()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file, where a folder is to be made; name another")
    scores: list[Score] = []
    for facts in found:
        _load(facts, model, data, trusted=cfg.trust_checkpoint)
        if not scores:  # once, and after a checkpoint has brought the data module's state
            data.prepare_data()
            data.setup("test")
        log.info("%s (%d of %d): epoch %d, step %d", facts.path.name, len(scores) + 1, len(found), facts.epoch,
                 facts.global_step)  # fmt: skip
        folder = out / facts.path.stem
        folder.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode():
            metrics = evaluation(model.to(device).eval(), data, folder)
        scores.append(_score(facts, metrics, evaluation))
        _write(scores, out, evaluation)  # after each, so that an interruption loses one at most
    Console().print(score_table(scores, title=evaluation.title, main_metric=evaluation.main_metric))
    say(f"evaluation: {out}")


def _build_evaluation(cfg: DictConfig) -> Evaluation:
    if "_target_" not in (cfg.evaluation or {}):
        choice = job_choices()["recipe"]
        raise ConfigError(
            f"recipe={choice} has no evaluation of its own; pl-pipe validate and pl-pipe test give what it logs "
            f"(evaluation=<option> chooses one)"
        )
    evaluation: Any = build(cfg.evaluation, what="evaluation")
    if not (callable(evaluation) and hasattr(evaluation, "title") and hasattr(evaluation, "main_metric")):
        raise ConfigError(
            f"evaluation._target_={cfg.evaluation._target_} builds a {type(evaluation).__name__}, which is no "
            f"evaluation; it must be callable and have a title and a main_metric"
        )
    checked: Evaluation = evaluation
    return checked


def _device(cfg: DictConfig) -> torch.device:
    """One device, however many the run was trained on: checkpoints have one format."""
    settings = trainer_settings(cfg)
    chosen = settings.devices
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hardware = resolve_hardware(replace(settings, devices=1, num_nodes=1), None, cuda_devices=cuda)
    if hardware.accelerator == "cpu" or not isinstance(chosen, list | tuple):
        return torch.device(hardware.accelerator)
    return torch.device("cuda", int(chosen[0]))


def _checkpoints(path: Path, *, trusted: bool) -> list[CheckpointFacts]:
    """The file's facts, or those of all in a directory by epoch and step; `best` and `last` only if no other is it."""
    if path.is_file():
        return [read_facts(path, trusted=trusted)]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [read_facts(file, trusted=trusted) for file in sorted(folder.glob("*.ckpt"))]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint (*.ckpt); give ckpt_path=<file or directory>")
    kept: dict[tuple[int, int], list[CheckpointFacts]] = {}
    for facts in sorted(found, key=lambda facts: facts.path.stem in _ALIASES):
        same = kept.setdefault((facts.epoch, facts.global_step), [])
        if not (same and facts.path.stem in _ALIASES):
            same.append(facts)
    return [facts for place in sorted(kept) for facts in kept[place]]


def _load(facts: CheckpointFacts, model: L.LightningModule, data: L.LightningDataModule, *, trusted: bool) -> None:
    """Weights into the model and the data module's own state into it, as Lightning does."""
    content = torch.load(facts.path, map_location="cpu", mmap=True, weights_only=not trusted)
    state = content.get(type(data).__qualname__)
    if state:
        data.load_state_dict(state)
    model.on_load_checkpoint(content)
    model.load_state_dict(content["state_dict"], strict=model.strict_loading)


def _score(facts: CheckpointFacts, metrics: dict[str, float], evaluation: Evaluation) -> Score:
    if evaluation.main_metric not in metrics:
        raise ConfigError(
            f"{type(evaluation).__name__} names {evaluation.main_metric!r} as its main metric, but returns "
            f"{', '.join(metrics) or 'none'}; let main_metric be one of them"
        )
    values = {name: float(value) for name, value in metrics.items()}
    return Score(checkpoint=facts.path.stem, epoch=facts.epoch, step=facts.global_step, metrics=values)


def _write(scores: list[Score], out: Path, evaluation: Evaluation) -> None:
    targets = {"table": out / "evaluation.csv"}
    if len(scores) > 1:
        targets["picture"] = out / "evaluation.png"
    with written_together(targets) as places:
        write_scores(scores, places["table"])
        if "picture" in places:
            draw_scores(scores, places["picture"], title=evaluation.title, main_metric=evaluation.main_metric)
