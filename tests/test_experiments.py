"""The published settings: every experiment composes to what was published, fits its model, and one is run."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from pipedream_farm import Farm, Order

from pl_pipe.cli.assemble import build, build_model
from pl_pipe.cli.front import prepare_hydra
from pl_pipe.strategies import PipeDreamStrategy, SDPipeStrategy
from tests.conftest import ROOT

pytest_plugins = "pipedream_plugin"

EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))
# name: workers, replicas, batch, rate, weight decay, epochs, policy
PUBLISHED = {
    "pipedream_vgg16_dp4": (4, None, 64, 0.01, 5e-4, 60, "polynomial"),
    "pipedream_vgg16_dp16": (16, None, 64, 0.04, 5e-4, 60, "polynomial"),
    "pipedream_vgg16_3_1": (4, [3, 1], 64, 0.01, 5e-4, 60, "polynomial"),
    "pipedream_vgg16_15_1": (16, [15, 1], 64, 0.04, 5e-4, 60, "polynomial"),
    "pipedream_alexnet_dp4": (4, None, 256, 0.01, 5e-4, 1, "polynomial"),
    "pipedream_alexnet_dp16": (16, None, 256, 0.01, 5e-4, 1, "polynomial"),
    "pipedream_alexnet_3_1": (4, [3, 1], 256, 0.01, 5e-4, 1, "polynomial"),
    "pipedream_alexnet_15_1": (16, [15, 1], 256, 0.01, 5e-4, 1, "polynomial"),
    "pipedream_resnet50_dp16": (16, None, 128, 0.1, 1e-4, 90, "step"),
}
# name: workers; all have batch 64, 10 epochs, rate 3e-4, no weight decay, polynomial decay
TRANSLATION = {
    "pipedream_gnmt8_straight4": 4,
    "pipedream_gnmt8_straight10": 10,
    "pipedream_gnmt16_straight4": 4,
    "pipedream_gnmt16_straight14": 14,
}
# name: batch of a pipeline, rate, weight decay, class of the blocks that stages are made of
SDPIPE = {
    "sdpipe_resnet50": (128, 0.1, 5e-4, "Bottleneck"),
    "sdpipe_bert": (64, 1e-4, 0.01, "TransformerLayer"),
}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    prepare_hydra("fit")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        yield


def composed(name: str) -> DictConfig:
    return compose("config", [f"experiment={name}"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_experiment_has_the_published_settings(name: str) -> None:
    workers, replicas, batch, rate, decay, epochs, policy = PUBLISHED[name]
    cfg = composed(name)
    assert cfg.recipe.arch == name.split("_")[1]
    assert (cfg.trainer.devices, cfg.data.batch_size, cfg.trainer.max_epochs) == (workers, batch, epochs)
    assert (cfg.recipe.optimizer, cfg.recipe.lr, cfg.recipe.weight_decay) == ("sgd", rate, decay)
    assert cfg.recipe.lr_policy == policy
    strategy = build(cfg.strategy, what="strategy")
    if replicas is None:
        assert strategy == "ddp" or type(strategy).__name__ == "DDPStrategy"
        return
    assert isinstance(strategy, PipeDreamStrategy)
    assert list(cfg.strategy.replicas) == replicas
    assert sum(replicas) == workers
    assert cfg.strategy["update"] == "minibatch"
    with torch.device("meta"):
        model = build_model(cfg)
    for module in cfg.strategy.split_points:
        assert isinstance(model.get_submodule(module), torch.nn.MaxPool2d)


@pytest.mark.parametrize("name", TRANSLATION)
def test_a_translation_has_the_published_settings(name: str) -> None:
    cfg = composed(name)
    layers = 8 if "gnmt16" in name else 4
    assert (cfg.recipe.encoder_layers, cfg.recipe.decoder_layers, cfg.recipe.hidden_size) == (layers, layers, 1024)
    assert (cfg.trainer.devices, cfg.data.batch_size, cfg.trainer.max_epochs) == (TRANSLATION[name], 64, 10)
    assert (cfg.recipe.lr, cfg.recipe.weight_decay, cfg.recipe.lr_policy) == (3e-4, 0.0, "polynomial")
    assert (cfg.data.max_length, cfg.recipe.label_smoothing, cfg.trainer.gradient_clip_val) == (50, 0.1, None)
    assert (cfg.strategy.plan, cfg.strategy.schedule) == ("straight", "pipedream")
    assert isinstance(build(cfg.strategy, what="strategy"), PipeDreamStrategy)
    with torch.device("meta"):
        build_model(cfg)


@pytest.mark.parametrize("name", SDPIPE)
def test_pipelines_that_average_have_the_artifacts_settings(name: str) -> None:
    batch, rate, decay, kind = SDPIPE[name]
    cfg = composed(name)
    assert (cfg.trainer.devices, cfg.strategy.pipelines, cfg.strategy.synchronizer) == (16, 4, "partial_reduce")
    assert (cfg.data.batch_size, cfg.recipe.lr, cfg.recipe.weight_decay) == (batch, rate, decay)
    assert cfg.recipe.get("optimizer") in (None, "sgd")  # BERT has one, which is its own
    assert cfg.trainer.max_epochs == 100
    assert isinstance(build(cfg.strategy, what="strategy"), SDPipeStrategy)
    with torch.device("meta"):
        blocks = [part for part, inner in build_model(cfg).named_modules() if type(inner).__name__ == kind]
    ends = [blocks.index(part) + 1 for part in cfg.strategy.split_points]
    counts = [end - start for start, end in pairwise([0, *ends, len(blocks)])]
    assert counts == {"Bottleneck": [4, 4, 4, 4]}.get(kind, [2, 4, 4, 2])


def test_every_experiment_is_known_and_mapped() -> None:
    """Those without a number of workers are what the others inherit from."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    for name in EXPERIMENTS:
        known = [*PUBLISHED, *TRANSLATION, *SDPIPE]
        assert name in known or any(other.startswith(f"{name}_") for other in known)
        assert f"`{name}`" in page or f"experiment={name}" in page, f"docs/experiments.md does not map {name}"


SMALL = [
    *("data=synthetic", "data.image_size=32", "data.batch_size=2", "data.num_classes=10", "data.num_samples=8"),
    *("recipe.width=0.05", "trainer.max_steps=2", "trainer.limit_val_batches=0", "trainer.accelerator=cpu"),
    *("trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false"),
]
"""Two steps on random images, small enough for a test; all else is as published."""


@pytest.mark.parametrize(
    "job", [Order("experiment_tasks.fit", ranks=4, overrides=["experiment=pipedream_vgg16_3_1", *SMALL])], ids=["3-1"]
)
def test_an_experiment_runs(farm: Farm, job: Order) -> None:
    for rank in farm.start(job).outcome:
        assert rank["steps"] == 2
        assert rank["plan"].shape == "3-1"
        assert rank["plan"].stages[0].modules[-1] == "network.features.16"
