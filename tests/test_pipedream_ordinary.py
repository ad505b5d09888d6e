"""Scripts of users as they stand, in what comes before, around and after training: as with one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ordinary.runner import differences
from pipedream_farm import Farm, Order
from torch import Tensor, nn

pytest_plugins = "pipedream_plugin"

OWN = Path(__file__).parent / "ordinary" / "pipeline"
WHOLE, LATE = "whole batches", "pipedream"
"""Strategies of the runner: one batch at a time, equal to one process; and several batches in flight."""


def script(name: str, ranks: int = 1, strategy: str = "plain") -> Order:
    own = OWN / f"{name}.py"
    return Order("ordinary.runner.run", ranks=ranks, script=str(own) if own.exists() else name, strategy=strategy)


def assert_same(farm: Farm, single: Order, pipeline: Order) -> None:
    """On rank 0 all that the script left, and everywhere its weights."""
    (expected,) = farm.start(single).outcome
    for rank, found in enumerate(farm.start(pipeline).outcome):
        for name in ("weights", "results", "trainers", "checkpoints") if rank == 0 else ("weights",):
            assert not list(differences(found[name], expected[name], name)), f"rank {rank}"


def assert_alike(ranks: list[dict[str, Any]]) -> None:
    """The same weights everywhere, and all of them numbers."""
    assert ranks[0]["weights"]
    for found in ranks:
        assert all(value.isfinite().all() for value in found["weights"].values())
        assert not list(differences(found["weights"], ranks[0]["weights"], tolerance=0.0))


# ---- after an error


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        (script(name), script(name, ranks, WHOLE))
        for name, ranks in (("exception_then_test", 2), ("raised_everywhere", 2), ("raised_everywhere", 3))
    ],
)
def test_what_all_ranks_raise_leaves_a_model_to_go_on_with(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_same(farm, single, pipeline)


@pytest.mark.parametrize("pipeline", [script("raised_everywhere", 3, LATE), script("exception_then_test", 2, LATE)])
def test_with_batches_in_flight_as_well(farm: Farm, pipeline: Order) -> None:
    """Ranks come to the error at different times; what was in flight is lost."""
    ranks = farm.start(pipeline).outcome
    assert_alike(ranks)
    assert "results" in ranks[0]["results"]


@pytest.mark.parametrize("order", [script("raised_on_one", 2, WHOLE), script("raised_on_one", 3, LATE)])
def test_after_an_error_of_one_rank_everything_else_is_refused_in_words(farm: Farm, order: Order) -> None:
    for rank, found in enumerate(farm.start(order).outcome):
        first, *later, anew = found["results"]["results"]
        assert first.startswith("OSError: no space" if rank == 1 else "PeerError: rank 1 (stage"), first
        for error in later:
            assert error.startswith(f"StageError: the last run failed, and rank {rank} has only its own stage"), error
        assert anew.startswith(f"StageError: an earlier run of this script ended on rank {rank} with "), anew


# ---- copies and pickles


@pytest.mark.parametrize(("single", "pipeline"), [(script("copied_trainer"), script("copied_trainer", 2, WHOLE))])
def test_a_copied_trainer_goes_on_as_the_original(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_same(farm, single, pipeline)


@pytest.mark.parametrize(
    "order",
    [script("copied_trainer", 3, LATE), script("copied_trainer", 2, "adaptive"), script("copied_trainer", 2, "uneven")],
)
def test_trainers_of_further_strategies_are_copied_and_pickled(farm: Farm, order: Order) -> None:
    ranks = farm.start(order).outcome
    assert_alike(ranks)
    assert ranks[0]["results"]["result_after"] == ["Trainer", "Trainer"]


# ---- data that each rank has made for itself


def own_data(source: int, ranks: int, strategy: str) -> Any:
    mode = "asynchronous" if strategy == LATE else "synchronous"
    mark = pytest.mark.feature("data that differ between ranks", group="data", mode=mode)
    return pytest.param(source, script("unseeded", ranks, strategy), marks=mark, id=f"{strategy}-{ranks}")


@pytest.mark.parametrize(("source", "order"), [own_data(0, 2, WHOLE), own_data(0, 3, "1f1b"), own_data(2, 3, LATE)])
def test_ranks_with_data_of_their_own_take_one_ranks(farm: Farm, source: int, order: Order) -> None:
    """Rank 0's, or with batches in flight those of the first stage, whose rank is the last one here."""
    job = farm.start(order)
    ranks = job.outcome
    assert_alike(ranks)
    results = [found["results"] for found in ranks]
    assert not torch.equal(results[0]["result_data"], results[1]["result_data"])
    for found in results:
        assert found["result_noisy"] == results[0]["result_noisy"]
        assert not list(differences(found["result_trained"], results[0]["result_trained"], tolerance=0.0))
    x = results[source]["result_data"]
    assert results[0]["result_seen"] == [float(part.double().sum()) for _ in range(2) for part in x.split(5)]
    if source == 0:
        expected = trained(results[0]["result_initial"], x)
        assert not list(differences(results[0]["result_trained"], expected))
    log = (job.folder / "rank0.log").read_text()
    assert f"the ranks have loaded different data, so that all take rank {source}'s" in log


def trained(initial: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """By one process, from there."""
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    net.load_state_dict({name.removeprefix("net."): value for name, value in initial.items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for part in [part for _ in range(2) for part in x.split(5)]:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(part), part.sum(1, keepdim=True)).backward()
        optimizer.step()
    return {f"net.{name}": value.detach() for name, value in net.state_dict().items()}


# ---- torch.compile


def compiled(name: str, ranks: int, strategy: str) -> Any:
    mode = "asynchronous" if strategy == LATE else "synchronous"
    mark = pytest.mark.feature("`torch.compile`, of the module or a part", group="model", mode=mode)
    return pytest.param(script(name), script(name, ranks, strategy), marks=mark, id=f"{name}-{ranks}-{strategy}")


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        compiled("compiled_inner", 2, WHOLE),
        compiled("compiled_inner", 3, WHOLE),
        compiled("compiled_ways", 2, WHOLE),
        compiled("compiled_ways", 3, WHOLE),
        compiled("compiled_ways", 3, LATE),
    ],
)
def test_what_is_compiled_runs_uncompiled_for_the_run(farm: Farm, single: Order, pipeline: Order) -> None:
    if pipeline.options["strategy"] == LATE:
        assert_alike(farm.start(pipeline).outcome)
    else:
        assert_same(farm, single, pipeline)
    job = farm.start(pipeline)
    assert "is compiled (torch.compile), and runs uncompiled here" in (job.folder / "rank0.log").read_text()
    if "compiled_ways" in single.options["script"]:
        assert job.outcome[1]["results"]["result_compiled"] == [True, True, True, True, False]


# ---- averages of weights


def averaged(name: str, ranks: int) -> Any:
    feature = "StochasticWeightAveraging" if name == "swa" else "EMAWeightAveraging"
    mark = pytest.mark.feature(feature, group="optimization", mode="synchronous")
    return pytest.param(script(name), script(name, ranks, WHOLE), marks=mark, id=f"{name}-{ranks}")


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [averaged(name, ranks) for name in ("ema_callback", "swa", "averaged_resumed") for ranks in (2, 3)],
)
def test_weights_are_averaged_where_they_are(farm: Farm, single: Order, pipeline: Order) -> None:
    """The average is as much in parts as the model is; in checkpoints and after the run it is whole."""
    assert_same(farm, single, pipeline)
