"""`pl-pipe profile strategy=fusion`: trains for a few steps, and says what was fused, how, and what was not and why."""

from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from pl_pipe.cli.assemble import build_data, build_model, build_trainer, hardware_of, seed_all
from pl_pipe.cli.messages import say
from pl_pipe.cli.run_directory import RunDirectory
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.fusion.fused_variants import FusedVariants
from pl_pipe.strategies.fusion.variant_training import FusionFacts
from pl_pipe.units import format_seconds

_STEPS = 10
"""Enough for every formulation to be timed."""
_FILE = "fusion.txt"


def profile_fusion(cfg: DictConfig, run: RunDirectory) -> None:
    """Leaves `fusion.txt`, the table of operations."""
    hardware = hardware_of(cfg)
    seed_all(cfg.seed)
    data, model = build_data(cfg), build_model(cfg)
    cfg.trainer.max_steps, cfg.trainer.max_epochs = _STEPS, _STEPS
    cfg.trainer.limit_val_batches, cfg.trainer.enable_checkpointing = 0, False
    cfg.trainer.enable_progress_bar, cfg.trainer.enable_model_summary = False, False
    cfg.strategy.folder = None
    trainer: Any = build_trainer(cfg, hardware, callbacks=[], logger=False, root=str(run.path))
    trainer.fit(model, datamodule=data)
    strategy = trainer.strategy
    facts = strategy.fusion_facts if isinstance(strategy, FusedVariants) else None
    if facts is None:
        raise ConfigError("nothing was trained, so there is nothing to tell; check the data set's size")
    if not trainer.is_global_zero:
        return
    Console().print(formulations_table(facts))
    if facts.lines:
        (run.path / _FILE).write_text("\n".join(facts.lines) + "\n")
        for line in facts.lines:
            say(line)
        say(f"operations: {run.path / _FILE}")
    else:
        say("no array was made: there is one variant, or strategy.formulation leaves it out")


def formulations_table(facts: FusionFacts) -> Table:
    table = Table(title=f"steps of {facts.variants} variants", title_justify="left")
    for name in ("step", "formulation", "time", ""):
        table.add_column(name, justify="right" if name == "time" else "left")
    for hook, chosen in facts.chosen.items():
        times = facts.step_s.get(hook) or {chosen: 0.0}
        for name, seconds in times.items():
            table.add_row(hook, name, format_seconds(seconds) if seconds else "", "chosen" if name == chosen else "")
    return table
