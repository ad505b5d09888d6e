"""Builds the objects of a run from its configuration."""

import os
from dataclasses import fields
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from pl_pipe.callbacks.hetero import HeteroDelays
from pl_pipe.cli.hardware import resolve_hardware
from pl_pipe.cli.run_directory import job_choices
from pl_pipe.cluster import ClusterConfig, detect_launch, network_environment
from pl_pipe.config import TrainerConfig
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.pipeline.described_links import plan_for
from pl_pipe.strategies.requirements import Hardware, StrategyAbout, check_requirements


def build(config: Any, *, what: str, expect: type | None = None) -> Any:
    """The object a configuration describes; its `about` block is for readers and stays out."""
    content: Any = _resolved(config, what) if OmegaConf.is_config(config) else config
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


def _resolved(config: Any, what: str) -> Any:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except InterpolationKeyError as error:
        fact = str(error).splitlines()[0]
        choices = job_choices()
        meant = OmegaConf.select(config, "about.data", default=None)
        remedy = f"choose one that it trains on: data={', '.join(meant)}" if meant else "set it"
        raise ConfigError(
            f"{what}={choices.get(what)} does not go together with data={choices.get('data')} ({error.full_key}: "
            f"{fact}); {remedy}"
        ) from error


def build_model(cfg: DictConfig) -> L.LightningModule:
    model = build(cfg.recipe, what="recipe", expect=L.LightningModule)
    assert isinstance(model, L.LightningModule)
    return model


def loads_strictly(model: L.LightningModule) -> bool:
    """Whether the model as built has just the parameters of its checkpoints; Lightning lets a model do otherwise."""
    changes = ("configure_model", "on_load_checkpoint", "on_save_checkpoint")
    return model.strict_loading and not any(is_overridden(hook, model) for hook in changes)


def build_data(cfg: DictConfig) -> L.LightningDataModule:
    data = build(cfg.data, what="data", expect=L.LightningDataModule)
    assert isinstance(data, L.LightningDataModule)
    return data


def build_named(group: Any, *, what: str, expect: type) -> list[Any]:
    """All entries of a group that holds several objects; an entry set to null is left out, and so is a null group."""
    entries = {} if group is None else group
    return [build(entry, what=f"{what}.{name}", expect=expect) for name, entry in entries.items() if entry is not None]


def build_callbacks(cfg: DictConfig, *, logs: bool) -> list[L.Callback]:
    """The chosen callbacks, less those that the trainer's settings leave no room for."""
    settings = trainer_settings(cfg)
    unwanted: list[type[L.Callback]] = []
    if not logs:
        unwanted.append(LearningRateMonitor)
    if settings.enable_progress_bar is False:
        unwanted.append(ProgressBar)
    if settings.enable_checkpointing is False:
        unwanted.append(Checkpoint)
    callbacks = build_named(cfg.callbacks, what="callbacks", expect=L.Callback)
    return [callback for callback in callbacks if not isinstance(callback, tuple(unwanted))]


def build_delays(cfg: DictConfig, hardware: Hardware) -> list[L.Callback]:
    """What makes workers late on purpose, if anything does; ranks that will not be are refused."""
    if OmegaConf.select(cfg, "hetero._target_") is None:
        return []
    delays = build(cfg.hetero, what="hetero", expect=L.Callback)
    if isinstance(delays, HeteroDelays):
        delays.check_ranks(hardware.world_size)
    return [delays]


def build_policies(cfg: DictConfig) -> list[L.Callback]:
    """What adapts while training runs."""
    return build_named(cfg.policy, what="policy", expect=L.Callback)


def trainer_settings(cfg: DictConfig) -> TrainerConfig:
    settings = OmegaConf.to_object(cfg.trainer)
    assert isinstance(settings, TrainerConfig)
    return settings


def hardware_of(cfg: DictConfig) -> Hardware:
    """The machine this run asks for; refuses what is not there and what the strategy cannot use."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hardware = resolve_hardware(
        trainer_settings(cfg),
        detect_launch(os.environ),
        cuda_devices=cuda,
        managed="NODE_RANK" in os.environ,
        share_device=bool(OmegaConf.select(cfg, "strategy.share_device", default=False)),
    )
    about = OmegaConf.select(cfg, "strategy.about")
    if about is not None:
        try:
            requirements = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StrategyAbout), about))
        except OmegaConfBaseException as error:
            raise ConfigError(f"strategy.about cannot be read: {error}") from error
        assert isinstance(requirements, StrategyAbout)
        check_requirements(job_choices()["strategy"], requirements, hardware)
    return hardware


def seed_all(seed: int) -> None:
    """Seeds every generator on every rank."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} is out of range; choose a number from 0 to {2**32 - 1}")
    L.seed_everything(seed, workers=True, verbose=False)


def use_network(cfg: DictConfig) -> None:
    """Puts the chosen network interface where gloo and NCCL look for it."""
    os.environ.update(network_environment(cluster_settings(cfg), os.environ))


def cluster_settings(cfg: DictConfig) -> ClusterConfig:
    cluster = OmegaConf.to_object(cfg.cluster)
    assert isinstance(cluster, ClusterConfig)
    return cluster


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
    plan_for(strategy, cluster_settings(cfg))
    if getattr(strategy, "accelerator", None) is not None:
        arguments["accelerator"] = "auto"  # a strategy that brings its own: several ranks on one device
    try:
        return L.Trainer(
            **arguments, strategy=strategy, callbacks=callbacks, logger=logger, default_root_dir=root,
            plugins=[AtomicCheckpointIO()],
        )  # fmt: skip
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigError(f"Lightning refuses the trainer's settings: {error}") from error
