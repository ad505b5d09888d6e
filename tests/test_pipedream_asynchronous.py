"""`pipedream` and `pipedream_2bw` inside Lightning, against their published rules written out in one process.

             drained        drained             in a segment, batch n computes on stage s of S with the weights
batches  0 1 2 3 │ 4 5 6 7 8 │ …                  pipedream       after n-(S-1-s) updates
         └segment┘ └ segment ┘                    vertical sync   after n-(S-1) updates
                                                  pipedream_2bw   after n-1 updates
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from late_rule import late_run
from pipedream_farm import Farm, Order
from pipedream_models import OPTIMIZERS, loader, make
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

pytest_plugins = "pipedream_plugin"

BATCHES = 5  # an epoch's; the last one is smaller
STAGE_OF_LAYER = {2: (0, 0, 1, 1), 3: (0, 1, 1, 2), 4: (0, 1, 2, 3)}
"""As pipedream_tasks.SPLITS cuts them."""


def order(ranks: int, schedule: str, *, optimizer: str = "momentum", seed: int = 0, **options: Any) -> Order:
    strategy = {"schedule": schedule, **options.pop("strategy", {})}
    given = {"scheduler": "step", "validation": False, **options}
    return Order(ranks=ranks, split=True, strategy=strategy, optimizer=optimizer, seed=seed, **given)


def lag_of(ranks: int, strategy: dict[str, Any]) -> Callable[[int], int]:
    """How many updates each stage computes behind."""
    if strategy["schedule"] == "pipedream_2bw":
        return lambda _: 1
    if strategy.get("vertical_sync"):
        return lambda _: ranks - 1
    return lambda stage: ranks - 1 - stage


def reference(
    found: dict[str, Any], of: Order, segments: Sequence[int]
) -> tuple[list[float], list[dict[str, Tensor]], list[float]]:
    """Losses, the weights after each update, and rates; `segments` are the batches before which it was drained."""
    model = make("Mlp", seed=of.options["seed"])
    lag, stages = lag_of(of.ranks, of.options["strategy"]), STAGE_OF_LAYER[of.ranks]
    optimizer = OPTIMIZERS[of.options["optimizer"]](model.parameters())
    first_rate = optimizer.param_groups[0]["lr"]
    losses, rates, start = [], [], 0
    history = [weights_of(model)]
    for number, (x, y) in enumerate(found["batches"]):
        start = number if number in segments else start
        used = {
            name: history[max(start, number - lag(stages[int(name.split(".")[1])]))][name].clone().requires_grad_()
            for name in history[0]
        }
        loss = F.cross_entropy(functional_call(model, used, (x,)), y)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            parameter.grad = used[name].grad
        clip(model, stages, of.options.get("trainer", {}))
        rates.append(first_rate / (1 + number / 4))
        optimizer.param_groups[0]["lr"] = rates[-1]
        optimizer.step()
        history.append(weights_of(model))
    return losses, history, rates


def clip(model: torch.nn.Module, stages: Sequence[int], trainer: dict[str, Any]) -> None:
    """By norm, each stage on its own."""
    limit = trainer.get("gradient_clip_val")
    if limit is None:
        return
    for stage in set(stages):
        own = [p for name, p in model.named_parameters() if stages[int(name.split(".")[1])] == stage]
        if trainer["gradient_clip_algorithm"] == "value":
            torch.nn.utils.clip_grad_value_(own, limit)
        else:
            torch.nn.utils.clip_grad_norm_(own, limit)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


CLIP = {"gradient_clip_val": 0.05}
CASES = [
    *(pytest.param(order(ranks, "pipedream", seed=ranks), id=f"pipedream-{ranks}") for ranks in (2, 3, 4)),
    *(pytest.param(order(ranks, "pipedream_2bw", seed=ranks), id=f"2bw-{ranks}") for ranks in (2, 3, 4)),
    pytest.param(
        order(3, "pipedream", strategy={"vertical_sync": True}, optimizer="adamw", seed=6), id="vertical-sync"
    ),
    pytest.param(order(2, "pipedream", trainer={**CLIP, "gradient_clip_algorithm": "value"}, seed=9), id="clip-value"),
    pytest.param(order(2, "pipedream", trainer={**CLIP, "gradient_clip_algorithm": "norm"}, seed=10), id="clip-norm"),
    pytest.param(order(2, "pipedream_2bw", strategy={"num_microbatches": 3}, optimizer="adamw"), id="2bw-3-parts"),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", CASES)
def test_training_follows_the_published_rule(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    losses, history, rates = reference(ranks[0], pipeline, range(0, 99, BATCHES))
    assert len(losses) == 2 * BATCHES
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-6, rel=0)
    for found in ranks:
        assert_weights({name: found["weights"][name] for name in history[0]}, history[-1])
        assert found["rates"][:-1] == pytest.approx(rates[1:], rel=1e-9)  # the scheduler has gone on by then
        assert found["batches_seen"] == ranks[0]["batches_seen"]
    plain, _, _ = reference(ranks[0], pipeline, range(99))  # drained after every batch
    assert ranks[0]["losses"] != pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("pipeline", CASES)
def test_a_stage_keeps_no_more_weight_versions_than_it_needs(farm: Farm, pipeline: Order) -> None:
    """Warm-up + 1, or two; and nothing of other stages' weights or optimizer state."""
    strategy = pipeline.options["strategy"]
    ranks = farm.start(pipeline).outcome
    assert [found["stage"] for found in ranks] == list(range(pipeline.ranks))[::-1]  # rank 0 has the last stage
    for found in ranks:
        assert found["warmup"] == pipeline.ranks - 1 - found["stage"]
        if strategy["schedule"] == "pipedream_2bw":
            assert found["peak"] == 2
        elif strategy.get("vertical_sync"):
            assert found["peak"] <= pipeline.ranks
        else:
            in_time = pipeline.ranks < 4  # five batches are too few for a fourth version
            assert found["peak"] == found["warmup"] + 1 if in_time else found["peak"] <= found["warmup"] + 1
        layers = [index for index, stage in enumerate(STAGE_OF_LAYER[pipeline.ranks]) if stage == found["stage"]]
        own = {name for name in found["names"] if int(name.split(".")[1]) in layers}
        assert set(found["own"]) == set(found["with_state"]) == own
        assert set(found["meta"]) == set(found["names"]) - own
        assert "meta" not in found["state_on"]
        assert found["drained"]


MID_EPOCH = order(3, "pipedream", validation=True, trainer={"val_check_interval": 2, "max_epochs": 2}, seed=7)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [MID_EPOCH])
def test_a_validation_within_an_epoch_sees_all_updates(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    ends = ranks[0]["ends"]
    assert ends == [2, 4, 7, 9]
    losses, history, _ = reference(ranks[0], pipeline, [0, 2, 4, 5, 7, 9])
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-6, rel=0)
    assert_weights({name: ranks[1]["weights"][name] for name in history[0]}, history[-1])
    model = make("Mlp", seed=7)
    for end, metrics in zip(ends, ranks[2]["validated"], strict=True):
        total = count = 0.0
        for x, y in loader(seed=57, samples=7):
            total += float(F.cross_entropy(functional_call(model, history[end], (x,)), y)) * len(x)
            count += len(x)
        assert metrics["val_loss"] == pytest.approx(total / count, abs=2e-6)


SHORT = order(
    2,
    "pipedream_2bw",
    scheduler=None,
    strategy={"num_microbatches": 4},
    trainer={"accumulate_grad_batches": 2, "max_epochs": 2},
    data={"samples": 22, "sizes": [4, 4, 2, 4, 4, 4]},
    seed=11,
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [SHORT])
def test_a_short_batch_ends_the_update_that_it_would_share(farm: Farm, pipeline: Order) -> None:
    """With fewer micro-batches than the others it would shift the bounds of all later updates; Lightning itself makes
    no step at that batch, the first of two that it accumulates."""
    ranks = farm.start(pipeline).outcome
    rates = [0.2] * 12
    losses, expected = late_run(
        {"batches": ranks[0]["batches"], "first_rates": rates, "segments": [0, 3, 6, 9]}, pipeline
    )
    assert len(losses) == 12
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-6, rel=0)
    for found in ranks:
        assert_weights({name: found["weights"][name] for name in expected}, expected)


SAVED = order(3, "pipedream", checkpoint={"every_n_train_steps": 3, "save_top_k": -1}, seed=8)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [SAVED])
def test_a_checkpoint_within_an_epoch_has_all_updates(farm: Farm, pipeline: Order) -> None:
    """Batches that are in flight are finished first, on every rank."""
    job = farm.start(pipeline)
    ranks = job.outcome
    losses, history, _ = reference(ranks[0], pipeline, [0, 3, 5, 6, 9])
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-6, rel=0)
    files = sorted((job.folder / "kept").iterdir())
    kept = {torch.load(file, weights_only=True)["global_step"]: torch.load(file, weights_only=True) for file in files}
    assert sorted(kept) == [3, 6, 9]
    for step, content in kept.items():
        assert_weights({name: content["state_dict"][name] for name in history[0]}, history[step])
        assert len(content["optimizer_states"][0]["state"]) == len(history[0])
