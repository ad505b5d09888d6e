"""Checkpoints: what a pipeline writes is what plain Lightning writes, and either continues from the other's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"

LAST = {"save_last": True, "filename": "{epoch}"}
ADAMW = Order(model="Groups", checkpoint=LAST, scheduler=None, trainer={"max_epochs": 1})
MOMENTUM = Order(optimizer="momentum", scheduler="step", checkpoint=LAST, trainer={"max_epochs": 1}, seed=1)
ADAGRAD = Order(optimizer="adagrad", checkpoint=LAST, trainer={"max_epochs": 1}, seed=7)
TIED = Order(
    model="SharedEmbedding",
    data={"kind": "tokens"},
    validation=False,
    optimizer="adamw",
    checkpoint=LAST,
    trainer={"max_epochs": 1},
)
NORMED = Order(
    model="Normed",
    validation=False,
    data={"samples": 20},
    checkpoint=LAST,
    trainer={"max_epochs": 1},
    scheduler="epoch",
)


def content_of(path: Path | str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    """The same structure all the way down, and equal values."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            if key not in ("dirpath", "best_model_path", "last_model_path", "kth_best_model_path", "best_k_models"):
                assert_alike(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_alike(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device), where
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-6, rel=1e-5), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pytest.param(ADAMW, ADAMW.over(3, split=True, strategy={"schedule": "1f1b"}), id="groups-3-1f1b"),
        pytest.param(MOMENTUM, MOMENTUM.over(4, split=True, strategy={"schedule": "gpipe"}), id="momentum-4-gpipe"),
        pytest.param(ADAGRAD, ADAGRAD.over(2, split=True, strategy={"schedule": "1f1b"}), id="adagrad-2-1f1b"),
        pytest.param(TIED, TIED.over(2, strategy={"schedule": "1f1b"}), id="tied-2-1f1b"),
        pytest.param(NORMED, NORMED.over(2, strategy={"schedule": "1f1b", "num_microbatches": 1}), id="buffers-2-1f1b"),
    ],
)
def test_the_file_is_the_single_runs(farm: Farm, single: Order, pipeline: Order) -> None:
    """Every key, the optimizer's groups and the state of each parameter, loops, schedulers and callbacks."""
    plain, job = farm.start(single), farm.start(pipeline)
    assert plain.outcome
    expected = content_of(plain.folder / "kept" / "last.ckpt")
    assert len({found["last_path"] for found in job.outcome}) == 1
    found = content_of(job.folder / "kept" / "last.ckpt")
    assert found["optimizer_states"][0]["state"].keys() == expected["optimizer_states"][0]["state"].keys()
    assert_alike(found, expected)
    if single is TIED:
        state = found["state_dict"]
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


@pytest.mark.feature("training continued under another plan, or without one", group="checkpoints", mode="synchronous")
def test_training_continues_across_plans_and_without_one(farm: Farm) -> None:
    """Four stages, two, a single process, three: each for an epoch from the last one's file, with one loss curve."""
    whole = farm.start(Order(scheduler="step", optimizer="adamw", trainer={"max_epochs": 4}, seed=4))
    losses: list[float] = []
    path: str | None = None
    for epoch, (ranks, schedule) in enumerate([(4, "1f1b"), (2, "gpipe"), (1, ""), (3, "1f1b")]):
        options = {"scheduler": "step", "optimizer": "adamw", "seed": 4, "ckpt_path": path, "checkpoint": LAST}
        link = Order(trainer={"max_epochs": epoch + 1}, **options)
        if ranks > 1:
            link = link.over(ranks, split=True, strategy={"schedule": schedule})
        job = farm.start(link)
        losses += job.outcome[0]["losses"]
        last = job.outcome
        path = str(job.folder / "kept" / "last.ckpt")
    expected = whole.outcome[0]
    assert losses == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    for found in last:
        assert found["rates"] == pytest.approx(expected["rates"][15:])
        assert (found["epoch"], found["steps"]) == (4, 20)
        assert_alike(found["weights"], expected["weights"])


@pytest.mark.feature("training continued within an epoch", group="checkpoints", mode="synchronous")
@pytest.mark.feature("training continued within an epoch", group="checkpoints", mode="asynchronous")
def test_training_continues_within_an_epoch(farm: Farm) -> None:
    """Saved while batches were in flight; continued by a single process, by a synchronous and a late pipeline."""
    options: dict[str, Any] = {"scheduler": "step", "optimizer": "adamw", "seed": 5, "validation": False}
    saving = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    job = farm.start(Order(ranks=3, split=True, checkpoint=saving, **options))
    assert job.outcome
    path = str(job.folder / "kept" / "step=3.ckpt")
    assert content_of(path)["global_step"] == 3
    rest = Order(ckpt_path=path, **options)
    single = farm.start(rest)
    pipeline = farm.start(rest.over(2, split=True, strategy={"schedule": "1f1b"}))
    late = farm.start(rest.over(2, split=True))
    expected = single.outcome[0]
    assert len(expected["losses"]) == 7
    for found in pipeline.outcome:
        assert_alike(found["weights"], expected["weights"])
        assert found["batches_seen"] == expected["batches_seen"]
        assert found["rates"] == pytest.approx(expected["rates"])
    assert pipeline.outcome[0]["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    assert late.outcome[0]["batches_seen"] == expected["batches_seen"]
    assert late.outcome[0]["losses"][0] == pytest.approx(expected["losses"][0], abs=1e-6)
    assert late.outcome[1]["steps"] == expected["steps"] == 10


@pytest.mark.feature("training continued under another plan, or without one", group="checkpoints", mode="asynchronous")
def test_weights_of_a_late_pipeline_are_validated_alike_everywhere(farm: Farm) -> None:
    """A checkpoint of `pipedream` gives the same metrics in a single process and over other stages."""
    trained = farm.start(Order(ranks=3, checkpoint=LAST, trainer={"max_epochs": 1}, seed=6))
    expected = trained.outcome[0]["validated"][-1]
    path = str(trained.folder / "kept" / "last.ckpt")
    validate = Order(calls=["validate"], ckpt_path=path, seed=6)
    jobs = [farm.start(validate), farm.start(validate.over(2))]
    for job in jobs:
        for found in job.outcome:
            for name in ("val_loss", "val_acc", "val_spread"):
                assert found["validate"][0][name] == pytest.approx(expected[name], abs=2e-6)
