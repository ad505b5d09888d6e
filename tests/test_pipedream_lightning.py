"""Lightning's options and callbacks over a pipeline; docs/support.md is made of the features named here.

Each script runs in a single process, over a synchronous pipeline, which must do the same, and over a late one.
"""

from typing import Any

import pytest
from lightning_checks import assert_late_script, assert_same_script
from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
SAVE = ["ModelCheckpoint", {"every_n_train_steps": 3, "save_top_k": -1, "save_last": True}]
ONE_EPOCH = {"max_epochs": 1}


def script(**options: Any) -> Order:
    return Order("lightning_task.script", **options)


SCRIPTS: dict[str, tuple[Order, dict[str, list[str]]]] = {
    "everyday": (
        script(
            model="Logs",
            scheduler="step",
            callbacks=[["LearningRateMonitor", {}], SAVE, ["Summary", {}]],
            trainer={
                "num_sanity_val_steps": 2,
                "val_check_interval": 2,
                "gradient_clip_val": 0.5,
                "enable_progress_bar": True,
                "enable_model_summary": True,
            },
        ),
        {
            "validation": ["the sanity check", "`val_check_interval`, in the middle of an epoch"],
            "logging": [
                "`self.log` with on_step, on_epoch, sync_dist, reduce_fx, batch_size, rank_zero_only",
                "`self.log` in hooks",
                "torchmetrics objects and collections",
                "loggers: every row and its step",
                "LearningRateMonitor",
                "the progress bar",
                "ModelSummary of the whole model",
            ],
            "optimization": ["schedulers by step", "`gradient_clip_val` by norm (asynchronous: each stage's own norm)"],
            "checkpoints": ["ModelCheckpoint with every_n_train_steps", "ModelCheckpoint with save_last"],
        },
    ),
    "plateau": (
        script(
            scheduler="plateau",
            seed=6,
            callbacks=[
                ["LearningRateMonitor", {"logging_interval": "epoch"}],
                ["EarlyStopping", {"monitor": "val_acc", "mode": "max", "patience": 2}],
                ["ModelCheckpoint", {"monitor": "val_loss", "save_top_k": 2, "save_weights_only": True}],
            ],
            trainer={"max_epochs": 8, "val_check_interval": 0.4, "min_epochs": 2},
        ),
        {
            "validation": ["`val_check_interval` as a share of the epoch"],
            "optimization": ["ReduceLROnPlateau by epoch"],
            "stopping": ["EarlyStopping", "`min_epochs`"],
            "checkpoints": ["ModelCheckpoint with monitor and save_top_k"],
        },
    ),
    "limits": (
        script(
            seed=2,
            optimizer="adamw",
            trainer={
                "limit_train_batches": 3,
                "limit_val_batches": 0.5,
                "check_val_every_n_epoch": 2,
                "max_epochs": 3,
                "gradient_clip_val": 0.05,
                "gradient_clip_algorithm": "value",
                "log_every_n_steps": 2,
            },
        ),
        {
            "validation": ["`check_val_every_n_epoch`"],
            "data": ["`limit_train_batches`, `limit_val_batches`"],
            "optimization": ["`gradient_clip_val` by value"],
            "logging": ["`log_every_n_steps`"],
        },
    ),
    "max-steps": (
        script(seed=3, scheduler="epoch", callbacks=[SAVE], trainer={"max_steps": 7, "max_epochs": -1}),
        {"stopping": ["`max_steps`, in the middle of an epoch"], "optimization": ["schedulers by epoch"]},
    ),
    "fast-dev-run": (
        script(seed=4, trainer={"fast_dev_run": 3}, callbacks=[SAVE]),
        {"stopping": ["`fast_dev_run`"]},
    ),
    "overfit": (
        script(seed=5, shuffle=True, trainer={"overfit_batches": 2, "inference_mode": False, "detect_anomaly": True}),
        {"data": ["`overfit_batches`"], "validation": ["`inference_mode=False`"], "optimization": ["`detect_anomaly`"]},
    ),
    "several-loaders": (
        script(
            seed=6,
            model="SeveralLoaders",
            validation="two_in_turn",
            calls=["fit", "validate", "fit", "test", "predict"],
        ),
        {
            "validation": ["several DataLoaders"],
            "calls": ["`trainer.fit` twice", "`trainer.validate`, `test` and `predict`, after a fit and between"],
        },
    ),
    "remembers": (
        script(seed=11, model="Remembers", scheduler="step", calls=["fit", "validate", "fit"], trainer=ONE_EPOCH),
        {
            "model": ["tensors that modules make when first called, and keep"],
            "optimization": ["`self.optimizers()` and `self.lr_schedulers()` in a step"],
        },
    ),
    "stream": (
        script(seed=7, data="stream", validation="stream", trainer={"val_check_interval": 2}),
        {"data": ["an IterableDataset without length"]},
    ),
    "late-layers": (
        script(seed=8, model="MadeLate", shuffle=True, trainer={"reload_dataloaders_every_n_epochs": 1}),
        {"model": ["`configure_model`"], "data": ["`reload_dataloaders_every_n_epochs`", "shuffling"]},
    ),
    "normed": (
        script(seed=9, model="HalfMasked", data_options={"samples": 20}, trainer={"num_sanity_val_steps": 1}),
        {"model": ["batch norm, in training and evaluation"]},
    ),
    "overrides": (
        script(seed=10, model="Overrides", scheduler="step"),
        {
            "model": [
                "overridden `optimizer_step`, `optimizer_zero_grad`, `lr_scheduler_step`, `configure_gradient_clipping`"
            ]
        },
    ),
    "augmented": (
        script(seed=11, model="AugmentsOnDevice", data="split", validation=None, trainer={"num_sanity_val_steps": 1}),
        {
            "data": [
                "random augmentation in the data set and in `on_after_batch_transfer`: all stages see one batch",
                "a LightningDataModule that splits at random in `setup`",
            ]
        },
    ),
    "keeps": (
        script(seed=12, model="Keeps", callbacks=[["SavesByHand", {"step": 3}]]),
        {
            "model": ["results kept from step to step, read on rank 0", "`save_hyperparameters`"],
            "checkpoints": ["`trainer.save_checkpoint` in a callback", "`on_save_checkpoint`"],
        },
    ),
    "named": (
        script(seed=13, model="NamedBatch", data="two_at_once", trainer=ONE_EPOCH),
        {"data": ["a CombinedLoader for training, batches by name"]},
    ),
    "workers": (
        script(seed=14, data="workers", trainer={"max_epochs": 1, "precision": "64-true"}),
        {"data": ["loader workers"], "optimization": ["`precision=64-true`"]},
    ),
    "bfloat16": (
        script(seed=15, trainer={"precision": "bf16-mixed"}),
        {"optimization": ["`precision=bf16-mixed`"]},
    ),
    "skips": (
        script(seed=16, model="Skips"),
        {"stopping": ["`on_train_batch_start` that returns -1"]},
    ),
    "example": (
        script(seed=17, model="Example", callbacks=[["Summary", {}]], trainer={"max_epochs": 1, "profiler": "simple"}),
        {"logging": ["ModelSummary with an example: sizes and operations", "Lightning's profilers"]},
    ),
    "accumulation-by-epoch": (
        script(seed=18, callbacks=[["GradientAccumulationScheduler", {"scheduling": {"0": 1, "1": 2}}]]),
        {"optimization": ["GradientAccumulationScheduler"]},
    ),
    "stopped-by-validation": (
        script(
            seed=19,
            callbacks=[["StopsAt", {"step": 6, "rank": 0, "hook": "on_validation_end"}]],
            trainer={"max_epochs": 4, "val_check_interval": 2},
        ),
        {"stopping": ["`trainer.should_stop` at a validation, set on rank 0 alone"]},
    ),
    "stopped-by-epoch": (
        script(
            seed=20,
            callbacks=[["StopsAt", {"step": 2, "rank": 0}]],
            trainer={"max_epochs": 4, "min_steps": 8},
        ),
        {"stopping": ["`min_steps`"]},
    ),
    "accumulated": (  # and saved, at some of the batches after which the step is the same
        script(seed=21, callbacks=[SAVE], trainer={"accumulate_grad_batches": 2, "max_epochs": 3}, scheduler="step"),
        {},
    ),
    "adagrad": (
        script(seed=22, optimizer="adagrad"),
        {"optimization": ["optimizers that make their state at once (Adagrad)"]},
    ),
    "written": (
        script(seed=23, data="written", model="ReadsText", trainer=ONE_EPOCH),
        {"data": ["texts and arrays in a batch, one entry a sample, in tuples and lists"]},
    ),
    "averages": (
        script(seed=24, model="Averages", callbacks=[SAVE]),
        {"model": ["buffers that the step assigns anew, from another stage's values"]},
    ),
    "clips-by-hand": (
        script(seed=25, model="ClipsByHand"),
        {"optimization": ["`clip_grad_norm_` in `configure_gradient_clipping` (asynchronous: each stage's own norm)"]},
    ),
    "keeps-read": (
        script(seed=26, model="KeepsRead", trainer=ONE_EPOCH),
        {"model": ["attributes that the step sets before it reads a value"]},
    ),
}
RANKS = {name: 2 + number % 2 for number, name in enumerate(SCRIPTS)}
"""Two and three in turn."""
WHOLE_BATCHES = ("normed", "bfloat16", "averages", "keeps-read")
"""Statistics of a part are not the batch's, nor are a step's runs; and a sum over parts rounds differently."""
BY_RULE = (
    "everyday",
    "plateau",
    "limits",
    "max-steps",
    "stream",
    "keeps",
    "augmented",
    "stopped-by-validation",
    "stopped-by-epoch",
    "accumulated",
    "adagrad",
)
"""Scripts of an Mlp, whose late run is written out in `late_run`."""


def cases(schedules: dict[int, str], mode: str, *, without: tuple[str, ...] = ()) -> list[Any]:
    found = []
    for name, (single, features) in SCRIPTS.items():
        if name in without:
            continue
        ranks = RANKS[name]
        strategy: dict[str, Any] = {"schedule": schedules[ranks]}
        if name in WHOLE_BATCHES and mode == SYNCHRONOUS:
            strategy["num_microbatches"] = 1
        split = name in BY_RULE and mode == ASYNCHRONOUS
        pipeline = single.over(ranks, strategy=strategy, **({"split": True} if split else {}))
        marks = [
            pytest.mark.feature(feature, group=group, mode=mode)
            for group, listed in features.items()
            for feature in listed
        ]
        found.append(pytest.param(single, pipeline, id=f"{name}-{ranks}-{strategy['schedule']}", marks=marks))
    return found


@pytest.mark.parametrize(("single", "pipeline"), cases({2: "1f1b", 3: "gpipe"}, SYNCHRONOUS))
def test_a_synchronous_pipeline_runs_the_script_as_one_process(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_same_script(farm.start(single).outcome[0], farm.start(pipeline).outcome)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("single", "pipeline"),
    cases({2: "pipedream_2bw", 3: "pipedream"}, ASYNCHRONOUS, without=("accumulation-by-epoch", "plateau")),
)
def test_a_late_pipeline_runs_the_script(farm: Farm, single: Order, pipeline: Order) -> None:
    expected, ranks = farm.start(single).outcome[0], farm.start(pipeline).outcome
    assert_late_script(expected, ranks, pipeline, exact=pipeline.options.get("split", False))


DECIDES = [case for case in cases({2: "pipedream_2bw", 3: "pipedream"}, ASYNCHRONOUS) if case.id.startswith("plateau")]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("single", "pipeline"), DECIDES)
def test_a_late_pipeline_takes_its_own_decisions_alike_on_all_ranks(farm: Farm, single: Order, pipeline: Order) -> None:
    """Early stopping, plateaus and the best checkpoints follow its own metrics, which are not the single run's."""
    ranks = farm.start(pipeline).outcome
    assert_late_script(ranks[0], ranks, pipeline, exact=True)
    assert 5 < ranks[0]["steps"] < 40, "the case must stop early"
    assert len(set(ranks[0]["rates"])) > 1, "the case must reach a plateau"
