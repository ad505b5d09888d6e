"""What the ranks of a job do with a published experiment: a few steps of it, built from its configuration."""

from typing import Any

import lightning as L
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pipedream_tasks import Rank
from recorded_tasks import Notes

from pl_pipe.cli.assemble import build, build_data, build_model
from pl_pipe.cli.front import prepare_hydra


def fit(me: Rank, *, overrides: list[str]) -> dict[str, Any]:
    prepare_hydra("fit")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        cfg = compose("config", overrides)
    assert cfg.trainer.devices == me.ranks
    settings: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    notes = Notes(me)
    trainer = L.Trainer(
        **settings, strategy=build(cfg.strategy, what="strategy"), callbacks=[notes], logger=False,
        default_root_dir=me.folder,
    )  # fmt: skip
    L.seed_everything(1)
    trainer.fit(build_model(cfg), datamodule=build_data(cfg))
    return me.notes
