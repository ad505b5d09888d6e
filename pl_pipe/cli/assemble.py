"""Builds the objects of a run from its configuration."""

import os
from dataclasses import fields
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import DictConfig, OmegaConf

from pl_pipe.cli.hardware import resolve_hardware
from pl_pipe.cli.run_directory import job_choices
from pl_pipe.cluster import ClusterConfig, detect_launch, network_environment
from pl_pipe.config import TrainerConfig
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.requirements import Hardware, StrategyAbout, check_requirements


def build(config: Any, *, what: str, expect: type | None = None) -> Any:
    """The object a configuration describes; its `about` block is for readers and stays out."""
    content: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    if not isinstance(content, dict) or "_target_" not in content:
        raise ConfigError(
            f"{what} has no _target_, so there is no class to build; name one, such as my_package.MyClass"
        )
    settings: dict[str, Any] = {str(name): value for name, value in content.items() if name != "about"}
    built = instantiate(settings, _convert_="all")
    if expect is not None and not isinstance(built, expect):
        raise ConfigError(
            f"{what}._target_={settings['_target_']} builds a {type(built).__name__}, expected a {expect.__name__}"
        )
    return built


def build_model(cfg: DictConfig) -> L.LightningModule:
    model = build(cfg.recipe, what="recipe", expect=L.LightningModule)
    assert isinstance(model, L.LightningModule)
    return model


def build_data(cfg: DictConfig) -> L.LightningDataModule:
    data = build(cfg.data, what="data", expect=L.LightningDataModule)
    assert isinstance(data, L.LightningDataModule)
    return data


def build_named(group: Any, *, what: str) -> list[Any]:
    """All entries of a group that holds several objects; an entry set to null is left out."""
    return [build(entry, what=f"{what}.{name}") for name, entry in group.items() if entry is not None]


def build_callbacks(cfg: DictConfig, *, logs: bool) -> list[L.Callback]:
    """The chosen callbacks; one that needs a logger is left out where there is none."""
    callbacks = build_named(cfg.callbacks, what="callbacks")
    return [callback for callback in callbacks if logs or not isinstance(callback, LearningRateMonitor)]


def trainer_settings(cfg: DictConfig) -> TrainerConfig:
    settings = OmegaConf.to_object(cfg.trainer)
    assert isinstance(settings, TrainerConfig)
    return settings


def hardware_of(cfg: DictConfig) -> Hardware:
    """The machine this run asks for; refuses what is not there and what the strategy cannot use."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hardware = resolve_hardware(trainer_settings(cfg), detect_launch(os.environ), cuda_devices=cuda)
    about = OmegaConf.select(cfg, "strategy.about")
    if about is not None:
        requirements = OmegaConf.to_object(about)
        assert isinstance(requirements, StrategyAbout)
        check_requirements(job_choices()["strategy"], requirements, hardware)
    return hardware


def use_network(cfg: DictConfig) -> None:
    """Puts the chosen network interface where gloo and NCCL look for it."""
    cluster = OmegaConf.to_object(cfg.cluster)
    assert isinstance(cluster, ClusterConfig)
    os.environ.update(network_environment(cluster, os.environ))


def build_trainer(
    cfg: DictConfig, hardware: Hardware, *, callbacks: list[L.Callback], logger: Any, root: str
) -> L.Trainer:
    """The Trainer; what Lightning refuses of its settings is an error in the configuration."""
    settings = trainer_settings(cfg)
    arguments = {item.name: getattr(settings, item.name) for item in fields(settings)}
    arguments["accelerator"] = hardware.accelerator
    if isinstance(arguments["devices"], str) and "," not in arguments["devices"]:
        arguments["devices"] = hardware.devices
    strategy = build(cfg.strategy, what="strategy")
    try:
        return L.Trainer(
            **arguments, strategy=strategy, callbacks=callbacks, logger=logger, default_root_dir=root,
            enable_autolog_hparams=True,
        )  # fmt: skip
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigError(f"Lightning refuses the trainer's settings: {error}") from error
