"""Every configuration composes, and what it describes can be built and fits together."""

import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf, open_dict

from pl_pipe.cli.assemble import build, build_callbacks, build_data, build_model, build_named, build_policies
from pl_pipe.cli.front import prepare_hydra
from pl_pipe.config import TrainerConfig
from tests.conftest import ROOT, image_folder

CONF = ROOT / "conf"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "__pycache__")
FILES = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]
CHOICES = [(group, name) for group, name in FILES if group != "prepare"]
PREPARATIONS = [name for group, name in FILES if group == "prepare"]
RECIPES = [file.stem for file in sorted((CONF / "recipe").glob("*.yaml")) if "/image_classifier" in file.read_text()]
"""Of images; the others have tests of their own."""


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    prepare_hydra("fit")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        yield


def composed(*overrides: str, output: Path = Path("nowhere")) -> DictConfig:
    cfg = compose("config", list(overrides), return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(output)
    HydraConfig.instance().set_config(cfg)
    return cfg


def data_sets(recipe: str) -> list[str]:
    about = OmegaConf.load(CONF / "recipe" / f"{recipe}.yaml").about
    return [str(name) for name in about.data]


def test_the_groups_are_all_here() -> None:
    promised = "recipe data strategy trainer cluster hetero policy experiment logger callbacks evaluation prepare"
    assert set(promised.split()) == set(GROUPS)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes(group: str, name: str) -> None:
    cfg = composed(f"{group}={name}")
    with open_dict(cfg):
        del cfg["hydra"]
    OmegaConf.to_container(cfg, resolve=False, throw_on_missing=True)


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "strategy"])
def test_every_strategy_is_built(name: str) -> None:
    strategy = build(composed(f"strategy={name}").strategy, what="strategy")
    assert isinstance(strategy, str | L.pytorch.strategies.Strategy)


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "logger"])
def test_every_logger_is_built(name: str, tmp_path: Path) -> None:
    if name == "tensorboard":
        pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    loggers = build_named(composed(f"logger={name}", output=tmp_path).logger, what="logger", expect=Logger)
    assert len(loggers) == {"none": 0, "csv": 1, "tensorboard": 2}[name]


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "callbacks"])
def test_every_callback_is_built(name: str, tmp_path: Path) -> None:
    callbacks = build_callbacks(composed(f"callbacks={name}", output=tmp_path), logs=True)
    more_than_default = {"none": -4, "default": 0, "timeline": 1, "monitors": 3, "every_epoch": 1, "averaging": 1}
    assert len(callbacks) == 4 + more_than_default[name]


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "policy"])
def test_every_policy_is_built(name: str, tmp_path: Path) -> None:
    policies = build_policies(composed(f"policy={name}", output=tmp_path))
    assert len(policies) == (0 if name == "none" else 1)


@pytest.mark.parametrize(("recipe", "data"), [(recipe, data) for recipe in RECIPES for data in data_sets(recipe)])
def test_every_recipe_takes_its_data(recipe: str, data: str, tmp_path: Path) -> None:
    """One batch of the data set goes through the network; weights on the meta device, so full sizes cost nothing."""
    extra = []
    if data == "imagenet":
        image_folder(tmp_path, splits=("train", "val"), classes=2, size=260)
        extra = [f"data.root={tmp_path}", "data.num_classes=2"]
    if data == "cifar10":
        image_folder(tmp_path, splits=("train", "test"), classes=10, images=1, size=32)
        extra = [f"data.root={tmp_path}"]
    cfg = composed(f"recipe={recipe}", f"data={data}", "data.batch_size=2", "data.num_workers=0", *extra)
    module = build_data(cfg)
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    side = cfg.data.image_size
    assert images.shape == (2, 3, side, side)
    assert images.dtype == torch.float32
    assert int(labels.max()) < cfg.data.num_classes
    with torch.device("meta"):
        model = build_model(cfg)
    logits = model.network(images.to("meta"))  # type: ignore[operator,union-attr]
    assert logits.shape == (2, cfg.data.num_classes)


@pytest.mark.parametrize("name", PREPARATIONS)
def test_every_preparation_is_built(name: str) -> None:
    cfg = compose("prepare", [f"prepare={name}"])
    assert cfg.prepare.about.summary
    preparation = build(cfg.prepare, what="prepare")
    assert preparation.name == name
    assert all(source.url or source.page for source in preparation.sources)


LARGE = ("alexnet", "bert", "resnet18", "resnet50", "vgg16")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
        for group, name in CHOICES
        if group == "recipe" and name != "recorded"
    ],
)
def test_every_recipe_takes_steps_on_its_own_data(recipe: str, tmp_path: Path) -> None:
    """Two steps of training and of validation on small batches, of what `pl-pipe fit` would build."""
    L.seed_everything(1)
    cfg = composed(f"recipe={recipe}", "data.batch_size=4", output=tmp_path)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = build_model(cfg)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.fit(model, datamodule=build_data(cfg))
    assert cfg.recipe.about.monitor in trainer.callback_metrics
    # Validation may overflow so early: batch norm has seen two small batches.
    trained = {name: value for name, value in trainer.callback_metrics.items() if not name.startswith("val_")}
    assert trained
    assert all(bool(value.isfinite()) for value in trained.values())
    same = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not same, "these were not trained"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_introduced(recipe: str) -> None:
    about = composed(f"recipe={recipe}").recipe.about
    assert about.summary
    assert about.data[0] == "digits"
    assert about.monitor == "val_acc"


def test_trainer_config_has_every_argument_of_the_trainer() -> None:
    owned = {"self", "strategy", "logger", "callbacks", "default_root_dir", "plugins"}
    ours = {"enable_autolog_hparams", "model_registry"}  # left at Lightning's defaults
    theirs = set(inspect.signature(L.Trainer.__init__).parameters) - owned - ours
    assert {field.name for field in fields(TrainerConfig)} == theirs


def test_the_trainers_switches_leave_callbacks_out(tmp_path: Path) -> None:
    switches = ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false"]
    kept = build_callbacks(composed(*switches, output=tmp_path), logs=True)
    assert [type(callback).__name__ for callback in kept] == ["LearningRateMonitor"]


def test_a_recipe_may_choose_its_data_and_the_command_line_wins(tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    folder.mkdir()
    lines = ("# @package _global_", "defaults: [{override /data: synthetic}]", "recipe: {_target_: torch.nn.Identity}")
    (folder / "mine.yaml").write_text("\n".join(lines))
    search = f"hydra.searchpath=[file://{tmp_path}]"
    assert "synthetic" in composed("recipe=mine", search).data._target_
    assert "cifar10" in composed("recipe=mine", "data=cifar10", search).data._target_


@pytest.mark.parametrize("given", ["++strategy.variants.lr=[0.1,0.2]", "strategy.variants=[{lr:0.1},{lr:0.2}]"])
def test_variants_are_values_by_name_or_a_list(given: str) -> None:
    strategy = build(composed("strategy=fusion", given).strategy, what="strategy")
    assert strategy.choices == [{"lr": 0.1}, {"lr": 0.2}]
