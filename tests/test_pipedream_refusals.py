"""What a pipeline cannot do is refused with its remedy: at construction, or at setup on every rank alike."""

import re
from typing import Any

import pytest
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_same_run

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import PipeDreamStrategy

pytest_plugins = "pipedream_plugin"

EPOCH = {"max_epochs": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "dapple"}, "schedule=dapple is unknown; choose one of"),
        ({"num_microbatches": 4}, r"num_microbatches=4, but schedule=pipedream lets whole batches enter.*1f1b"),
        ({"schedule": "1f1b", "num_microbatches": 0}, "num_microbatches=0; a batch is divided"),
        ({"schedule": "1f1b", "vertical_sync": True}, "vertical_sync=true, but schedule=1f1b"),
        ({"timeout_s": 0}, "timeout_s=0; give the seconds"),
        ({"split_points": "layers.1"}, r"split_points='layers.1' is one text; give a list"),
    ],
)
def test_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipeDreamStrategy(**settings)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "manual": ({"model": "Manual"}, "ConfigError: Manual sets automatic_optimization=False.*set schedule=1f1b"),
    "own-backward": ({"model": "Own"}, r"ConfigError: Own overrides backward\(\).*set schedule=1f1b"),
    "two-optimizers": (
        {"model": "TwoOptimizers"},
        "RuntimeError: Training with multiple optimizers.*automatic_optimization = False",
    ),
    "lbfgs": ({"optimizer": "lbfgs"}, "ConfigError: LBFGS evaluates the step several times.*another optimizer"),
    "time-interval": (
        {"trainer": {"val_check_interval": "00:00:01:00", "check_val_every_n_epoch": None}},
        "ConfigError: val_check_interval=.* is a time.*number of batches",
    ),
    "split-number": (
        {"strategy": {"split_points": ["layers.0", "layers.1"]}},
        "ConfigError: split_points=.* makes 3 stages, the trainer has 2 devices; set devices=3",
    ),
    "split-name": ({"strategy": {"split_points": ["layers.7"]}}, "PlanError: .*layers.7.*"),
    "split-last": (
        {"strategy": {"split_points": ["layers.3"]}},
        "PlanError: split_points=.* leaves no module for stage 1.*split between two modules",
    ),
    "plan-and-split": (
        {"strategy": {"plan": "plan.json", "split_points": ["layers.1"]}},
        "ConfigError: plan=plan.json and split_points=.* leave one of them out",
    ),
    "no-such-plan": ({"strategy": {"plan": "nowhere.json"}}, "Error: .*nowhere.json"),
    "other-plan": (
        {"model": "Autoencoder", "strategy": {"plan": "mlp.json"}},
        "PlanError: plan=mlp.json is for another model: Autoencoder has no layers.0.0, .*make one with",
    ),
    "no-loss": (
        {"model": "ReturnsNothing"},
        "StageError: training_step of ReturnsNothing returned NoneType, not a loss",
    ),
    "plateau-by-step": (
        {"model": "PlateauByStep"},
        "ConfigError: ReduceLROnPlateau on train_loss with interval=step.*set interval=epoch",
    ),
    "own-plateau-by-step": (
        {"model": "OwnPlateauByStep"},
        "ConfigError: OwnPlateau on train_loss with interval=step.*set interval=epoch",
    ),
    "float16": ({"half": True}, "ConfigError: precision=16-mixed scales the loss by a GradScaler.*bf16-mixed"),
}
ALL = Order("refusals", ranks=2, cases={name: options for name, (options, _) in REFUSED.items()})
"""One after the other in the same processes; after each the next trainer must work as if nothing had been."""


FEATURES = {
    "manual": ("manual optimization", "optimization"),
    "own-backward": ("an overridden `backward`", "optimization"),
    "two-optimizers": ("several optimizers", "optimization"),
    "lbfgs": ("LBFGS", "optimization"),
    "float16": ("`precision=16-mixed`", "optimization"),
    "plateau-by-step": ("ReduceLROnPlateau by step", "optimization"),
    "time-interval": ("`val_check_interval` as a time", "validation"),
    "no-loss": ("a `training_step` that returns None", "optimization"),
}
"""For docs/support.md: what of Lightning is refused, and its group."""


def named(case: str) -> Any:
    if case not in FEATURES:
        return case
    feature, group = FEATURES[case]
    modes = ("synchronous", "asynchronous")
    marks = [pytest.mark.feature(feature, group=group, mode=mode, outcome="refused") for mode in modes]
    return pytest.param(case, id=case, marks=marks)


@pytest.mark.parametrize("name", map(named, REFUSED))
@pytest.mark.parametrize("job", [pytest.param(ALL, id="2")])
def test_a_run_is_refused_on_every_rank(farm: Farm, job: Order, name: str) -> None:
    for rank, found in enumerate(farm.start(job).outcome):
        assert re.search(REFUSED[name][1], found[name] or "nothing was refused"), f"rank {rank}: {found[name]}"


@pytest.mark.parametrize("job", [pytest.param(ALL, id="2")])
def test_a_refusal_leaves_everything_usable(farm: Farm, job: Order) -> None:
    """The last of them is a run that works."""
    ranks = farm.start(job).outcome
    assert len(ranks[0]["afterwards"]["losses"]) == 5
    assert ranks[0]["afterwards"]["weights"].keys() == ranks[1]["afterwards"]["weights"].keys()


READS = Order("fit", model="ReadsAcross", validation=False, trainer=EPOCH)


@pytest.mark.parametrize("order", [READS.over(3, split=True)])
def test_a_value_read_across_stages_is_refused_with_its_line(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert re.search(
            r"PlanError: a cut after .* cannot work: pipedream_models.py:\d+ reads .* from behind it, and .*; move",
            error,
        )


@pytest.mark.parametrize(("single", "order"), [(READS, READS.over(2, strategy={"schedule": "1f1b"}))])
def test_a_plan_cuts_where_the_read_can_work(farm: Farm, single: Order, order: Order) -> None:
    assert_same_run(farm.start(single).outcome[0], farm.start(order).outcome)


SETS = Order("fit", ranks=2, model="SetsAfterRead", validation=False, trainer=EPOCH, split=True)


REPLICATED = {"split_points": ["layers.1"], "replicas": [1, 2]}


@pytest.mark.parametrize(
    "order",
    [
        SETS,
        SETS.over(2, strategy={"schedule": "1f1b"}),
        pytest.param(SETS.over(2, strategy={"replicas": [2], "split_points": []}, split=False), id="data-parallel"),
        pytest.param(SETS.over(3, strategy=REPLICATED, split=False), id="replicas"),
    ],
)
def test_an_attribute_set_after_a_read_is_refused_with_its_line(farm: Farm, order: Order) -> None:
    """Ranks of earlier stages have left the step by then, and would go on with the old value."""
    for error in farm.start(order).errors:
        assert re.search(
            r"StageError: weight of SetsAfterRead .*lightning_models.py:\d+.*set it in on_train_batch_end", error
        )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (SETS.over(2, model="CountsAfterRead"), r"a buffer of stage 0 is changed after a value of stage 1 was read"),
        (
            SETS.over(2, model="RecountsAfterRead"),
            r"buffer steps of Recounts\w+ is assigned after .*models.py:\d+",
        ),
        (SETS.over(2, model="UsesKept"), r"a buffer is used that an earlier step assigned after .*models.py:\d+"),
        (SETS.over(2, model="HalvesAfterRead"), r"lr of parameter group 0 is set after .*models.py:\d+"),
    ],
)
def test_what_only_some_ranks_would_keep_is_refused_with_its_line(farm: Farm, order: Order, words: str) -> None:
    for error in farm.start(order).errors:
        assert re.search(rf"StageError: .*{words}.*(before the read|set schedule=1f1b)", error), error


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_end_when_one_fails(farm: Farm, rank: int) -> None:
    """In the middle of training, with batches in flight: nobody waits until the timeout."""
    job = farm.start(
        Order("fit", ranks=3, model=f"Fails{rank}", trainer=EPOCH, split=True, strategy={"timeout_s": 120.0})
    )
    errors = job.errors
    assert errors[rank] == "OSError: the disk is gone"
    assert job.seconds < 100, "the timeout is 120 s"


BORING = Order("fit", model="BoringModel", data={"kind": "boring"}, trainer=EPOCH)


@pytest.mark.parametrize(
    ("single", "order"), [(BORING, BORING.over(3, strategy={"schedule": "gpipe"})), (BORING, BORING.over(2))]
)
def test_devices_that_a_model_has_no_layers_for_stay_idle(farm: Farm, single: Order, order: Order) -> None:
    """Lightning's own BoringModel has one layer: it trains as in a single process, whatever the schedule."""
    job = farm.start(order)
    assert_same_run(farm.start(single).outcome[0], job.outcome)
    log = (job.folder / "rank0.log").read_text()
    assert f"{order.ranks} devices, but BoringModel can be divided into 1 at most" in log
    assert "set devices=1" in log
