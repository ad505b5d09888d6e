"""Further features of docs/support.md: modes of a model, outputs on other ranks, what is refused, how ranks start."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_models import Masked
from lightning_task import MODELS  # noqa: F401 - with these models
from pipedream_farm import Farm, Order
from pipedream_models import loader
from test_pipedream_lightning import ASYNCHRONOUS, SYNCHRONOUS, script

import pl_pipe  # noqa: F401
from pl_pipe.errors import ConfigError
from pl_pipe.strategies import PipeDreamStrategy

pytest_plugins = "pipedream_plugin"


def feature(name: str, group: str, mode: str, **more: str) -> Any:
    return pytest.mark.feature(name, group=group, mode=mode, **more)


def both(name: str, group: str, **more: str) -> list[Any]:
    return [feature(name, group, mode, **more) for mode in (SYNCHRONOUS, ASYNCHRONOUS)]


DROPOUT = script(model="Masked", data_options={"samples": 20}, calls=["fit", "validate"], trainer={"max_epochs": 1})
UNMASKED = script(
    model="HalfMasked", data_options={"samples": 20}, calls=["fit", "validate"], trainer={"max_epochs": 1}
)
WHOLE = {"schedule": "1f1b", "num_microbatches": 1}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("masked", "unmasked"),
    [
        pytest.param(
            DROPOUT.over(2, strategy=strategy),
            UNMASKED.over(2, strategy=strategy),
            id=strategy["schedule"],
            marks=feature("dropout, on in training and off in evaluation", "model", mode),
        )
        for strategy, mode in ((WHOLE, SYNCHRONOUS), ({"schedule": "pipedream"}, ASYNCHRONOUS))
    ],
)
def test_dropout_acts_in_training_alone(farm: Farm, masked: Order, unmasked: Order) -> None:
    ranks = farm.start(masked).outcome
    assert ranks[0]["losses"] != pytest.approx(farm.start(unmasked).outcome[0]["losses"], abs=1e-3)
    model = Masked()
    model.load_state_dict(ranks[0]["weights"])
    model.eval()
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*loader(seed=50, samples=7), strict=True))
        expected = torch.nn.functional.cross_entropy(model(x), y).item()
    assert ranks[0]["answers"][0][0]["val_loss"] == pytest.approx(expected, abs=3e-6)
    for found in ranks:
        trained, evaluated = 5, 2
        assert found["module"]["modes"] == [True] * trained + [False] * 2 * evaluated


OUTPUTS = script(model="Keeps", trainer={"max_epochs": 1})


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            OUTPUTS.over(2, strategy=strategy),
            id=strategy["schedule"],
            marks=feature("callbacks that read `outputs`", "logging", mode),
        )
        for strategy, mode in ((WHOLE, SYNCHRONOUS), ({"schedule": "pipedream"}, ASYNCHRONOUS))
    ],
)
@pytest.mark.parametrize("single", [OUTPUTS])
def test_callbacks_read_outputs_on_every_rank(farm: Farm, single: Order, pipeline: Order) -> None:
    expected = farm.start(single).outcome[0]["outputs"]
    first, other = (found["outputs"] for found in farm.start(pipeline).outcome)
    assert first == other
    assert [output["index"] for output in first] == [output["index"] for output in expected] == [0, 1, 2, 3, 4]
    assert [output["inputs"] for output in first] == pytest.approx([output["inputs"] for output in expected])
    assert first[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
    shown, of_other = (found["validation_outputs"] for found in farm.start(pipeline).outcome)
    assert of_other == shown  # hooks that read them get the numbers on every rank
    assert None not in shown


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "BackboneFinetuning": (
        {"model": "Backbone", "callbacks": [["BackboneFinetuning", {}]]},
        "ConfigError: BackboneFinetuning compares the values.*freeze modules in the model itself",
        "model",
    ),
    "SpikeDetection": (
        {"callbacks": [["SpikeDetection", {}]]},
        "ConfigError: SpikeDetection compares the loss on every rank.*is_global_zero",
        "stopping",
    ),
    "ModelPruning": (
        {"callbacks": [["ModelPruning", {"pruning_fn": "l1_unstructured"}]]},
        "ConfigError: ModelPruning looks at the weights of the whole model.*prune",
        "model",
    ),
    "BatchSizeFinder": (
        {"callbacks": [["BatchSizeFinder", {}]]},
        "ConfigError: BatchSizeFinder tries batches on one device only.*scale_batch_size",
        "data",
    ),
    "ModelCheckpoint with train_time_interval": (
        {"callbacks": [["ModelCheckpoint", {"train_time_interval": 1.0}]]},
        "ConfigError: ModelCheckpoint.train_time_interval=0:00:01. asks all ranks.*set every_n_train_steps",
        "checkpoints",
    ),
    "TensorBoardLogger with log_graph": (
        {"model": "Example", "trainer": {"max_epochs": 1, "logger": "graph"}},
        "ConfigError: TensorBoardLogger.log_graph=True. traces the whole model.*leave log_graph out",
        "logging",
    ),
    "plans and split points of another model": (
        {"strategy": {"split_points": ["layers.7"]}},
        "PlanError: .*layers.7.*",
        "model",
    ),
}
LATE_ONLY = {
    "LearningRateFinder": (
        {"callbacks": [["LearningRateFinder", {}]]},
        "ConfigError: LearningRateFinder asks all ranks after every batch.*set schedule=1f1b",
        "optimization",
    ),
    "StochasticWeightAveraging": (
        {"callbacks": [["StochasticWeightAveraging", {"swa_lrs": 0.1}]]},
        "ConfigError: StochasticWeightAveraging averages the weights after a batch",
        "optimization",
    ),
    "EMAWeightAveraging": (
        {"callbacks": [["EMAWeightAveraging", {}]]},
        "ConfigError: EMAWeightAveraging averages the weights after a batch",
        "optimization",
    ),
    "GradientAccumulationScheduler": (
        {"callbacks": [["GradientAccumulationScheduler", {"scheduling": {"0": 2}}]]},
        "ConfigError: GradientAccumulationScheduler.scheduling=.*in flight under schedule=pipedream.*or schedule=1f1b",
        "optimization",
    ),
}
JOB = Order("lightning_task.refused", ranks=2, cases={name: case[0] for name, case in (REFUSED | LATE_ONLY).items()})


@pytest.mark.parametrize("job", [pytest.param(JOB, id="2")])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            pytest.param(name, message, id=name, marks=both(name, group, outcome="refused"))
            for name, (_, message, group) in REFUSED.items()
        ),
        *(
            pytest.param(name, message, id=name, marks=feature(name, group, ASYNCHRONOUS, outcome="refused"))
            for name, (_, message, group) in LATE_ONLY.items()
        ),
    ],
)
def test_what_cannot_work_is_refused_at_setup(farm: Farm, job: Order, name: str, message: str) -> None:
    """On every rank; and metrics of the refused model add up over ranks as before."""
    for rank, found in enumerate(farm.start(job).outcome):
        assert re.search(message, found[name]["error"]), f"rank {rank}: {found[name]['error']}"
        assert all(found[name]["syncs"]), f"rank {rank}"
        assert found[name]["syncs"]


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=both("spawned ranks", "launch", outcome="refused"))]
)
def test_spawned_ranks_are_refused(start_method: str) -> None:
    with pytest.raises(ConfigError, match="start_method='spawn' is no option of PipeDreamStrategy"):
        PipeDreamStrategy(start_method=start_method)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=both("notebooks", "launch", outcome="refused"))])
def test_notebooks_are_refused(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(Exception, match=r"a notebook is none; save it as one .*or set devices=1"):
        L.Trainer(strategy="pipedream", accelerator="cpu", devices=devices, logger=False)


def test_callbacks_called_before_any_run_decide_alone(tmp_path: Path) -> None:
    """As with DDP there is nobody to ask yet."""
    trainer = L.Trainer(strategy=PipeDreamStrategy(), accelerator="cpu", devices=1, logger=False)
    stopping, keeper = EarlyStopping("loss", patience=0), ModelCheckpoint(tmp_path, monitor="loss")
    trainer.strategy.connect(BoringModel())
    for loss in (1.0, 2.0):
        trainer.callback_metrics["loss"] = torch.tensor(loss)
        stopping._run_early_stopping_check(trainer)
        assert keeper.check_monitor_top_k(trainer, torch.tensor(loss))
    assert trainer.should_stop
