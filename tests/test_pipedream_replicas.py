"""Replicated stages inside Lightning, over processes: `1f1b` and `gpipe` equal the single run, `pipedream` its rule.

With w forwards of warm-up, r replicas and `every` batches to an update, batch k of a segment (from one drained point to
the next) meets on its stage the weights after  max(0, r * (k // r - w) // every)  updates.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order
from pipedream_models import OPTIMIZERS, loader, make
from test_pipedream_synchronous import assert_same_run, assert_weights
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

pytest_plugins = "pipedream_plugin"

STAGE_OF_LAYER = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 3: (0, 1, 1, 2)}
DATA = {"samples": 33, "batch_size": 12}
"""The last batch of an epoch has 9 samples."""


def over(single: Order, replicas: Sequence[int], schedule: str, **options: Any) -> Any:
    settings = {"schedule": schedule, "replicas": list(replicas), **options.pop("strategy", {})}
    pipeline = single.over(sum(replicas), strategy=settings, split=True, **options)
    return pytest.param(single, pipeline, id=f"{'-'.join(map(str, replicas))}-{schedule}")


BEST = {"monitor": "val_loss", "mode": "min"}
MOMENTUM = Order(data=DATA, scheduler="step", checkpoint=BEST, trainer={"gradient_clip_val": 0.5})
ADAMW = Order(data={**DATA, "shuffle": True}, optimizer="adamw", trainer={"num_sanity_val_steps": 1}, seed=1)
METRICS = Order(model="CalledMetric", data=DATA, seed=2)
ACCUMULATED = Order(data=DATA, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, seed=3)
MID_EPOCH = Order(data=DATA, trainer={"val_check_interval": 2}, seed=4)

PAIRS = [
    over(MOMENTUM, (3, 1), "1f1b"),
    over(MOMENTUM, (2, 2), "1f1b"),
    over(ADAMW, (2,), "gpipe"),
    over(ADAMW, (1, 2, 1), "1f1b", strategy={"num_microbatches": 12}),  # more than the last batch has samples
    over(ADAMW, (1, 2), "gpipe", strategy={"num_microbatches": 5}),
    over(METRICS, (1, 2), "1f1b"),
    over(METRICS, (2, 1, 1), "gpipe"),
    over(METRICS, (4,), "1f1b"),
    over(ACCUMULATED, (2, 1), "1f1b"),
    over(MID_EPOCH, (1, 2), "1f1b"),
]


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_synchronous_plan_with_replicas_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert_same_run(farm.start(single).outcome[0], ranks)
    assert all(found["drained"] and found["peak"] == 1 for found in ranks)
    shape = pipeline.options["strategy"]["replicas"]
    stages = [found["stage"] for found in ranks]
    assert stages == [stage for stage in reversed(range(len(shape))) for _ in range(shape[stage])]


# --- pipedream ------------------------------------------------------------------------------------------------------


def order(replicas: Sequence[int], update: str = "round", *, accumulate: int = 1, **options: Any) -> Any:
    strategy = {"schedule": "pipedream", "replicas": list(replicas), "update": update, **options.pop("strategy", {})}
    trainer = {"accumulate_grad_batches": accumulate, **options.pop("trainer", {})}
    given = Order(
        ranks=sum(replicas), split=True, strategy=strategy, validation=False, trainer=trainer,
        **{"scheduler": "step", "optimizer": "momentum", "seed": sum(replicas), "data": {"samples": 40}, **options},
    )  # fmt: skip
    return pytest.param(given, id=f"{'-'.join(map(str, replicas))}-{update}-{accumulate}")


RULES = [
    order((2,)),
    order((4,), "minibatch"),
    order((3, 1)),
    order((3, 1), "minibatch"),
    order((2, 2), optimizer="adamw"),
    order((1, 2)),
    order((1, 2), "minibatch"),
    order((2, 1, 1)),
    order((1, 2, 1), "minibatch"),
    order((2, 1), accumulate=2),
    order((1, 1), accumulate=3),
]


def warmup_of(replicas: Sequence[int], stage: int) -> int:
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def reference(found: dict[str, Any], of: Order, per_epoch: int) -> tuple[list[float], dict[str, Tensor]]:
    """In one process: losses and the weights at the end. The pipeline is drained after every epoch."""
    options = of.options
    replicas, accumulate = options["strategy"]["replicas"], options["trainer"]["accumulate_grad_batches"]
    a_round = math.lcm(*replicas)
    averaged = [a_round if options["strategy"]["update"] == "round" else count for count in replicas]
    every = [count * accumulate for count in averaged]
    model = make(options.get("model", "Mlp"), seed=options["seed"])
    named = dict(model.named_parameters())
    stage_of = {name: STAGE_OF_LAYER[len(replicas)][int(name.split(".")[1])] for name in named}
    own = [[p for name, p in named.items() if stage_of[name] == stage] for stage in range(len(replicas))]
    optimizers = [OPTIMIZERS[options["optimizer"]](parameters) for parameters in own]
    first_rate = optimizers[0].param_groups[0]["lr"]
    losses: list[float] = []
    steps = 0  # of the scheduler, which Lightning asks once in `accumulate` batches

    for start in range(0, len(found["batches"]), per_epoch):
        batches = found["batches"][start : start + per_epoch]
        history: list[list[dict[str, Tensor]]] = [[weights(named)] for _ in replicas]
        gradients: list[dict[str, Tensor]] = []
        rates: list[float] = []
        for k, (x, y) in enumerate(batches):
            rates.append(first_rate / (1 + steps / 4))
            used = {}
            for name, stage in stage_of.items():
                version = max(0, replicas[stage] * (k // replicas[stage] - warmup_of(replicas, stage)) // every[stage])
                used[name] = history[stage][version][name].clone().requires_grad_()
            loss = F.cross_entropy(functional_call(model, used, (x,)), y)
            losses.append(loss.item())
            (loss / accumulate).backward()
            gradients.append({name: tensor.grad for name, tensor in used.items()})
            for stage, optimizer in enumerate(optimizers):
                is_last = k + 1 == len(batches)
                if (k + 1) % every[stage] and not is_last:
                    continue
                first = k // every[stage] * every[stage]
                for name in (name for name, home in stage_of.items() if home == stage):
                    parts = [part[name] for part in gradients[first:]]
                    named[name].grad = sum(parts) / min(averaged[stage], len(parts))
                optimizer.param_groups[0]["lr"] = rates[first]
                optimizer.step()
                history[stage].append(weights(named))
            if (k + 1) % accumulate == 0 or k + 1 == len(batches):
                steps += 1
    return losses, weights(named)


def weights(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", RULES)
def test_pipedream_with_replicas_follows_its_rule(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    per_epoch = len(loader(**pipeline.options["data"]))
    losses, expected = reference(ranks[0], pipeline, per_epoch)
    assert len(losses) == 2 * per_epoch > 12
    shown = [
        loss / pipeline.options["trainer"]["accumulate_grad_batches"] for loss in losses
    ]  # as plain Lightning does
    assert ranks[0]["losses"] == pytest.approx(shown, abs=1e-6, rel=0)
    for found in ranks:
        assert_weights({name: found["weights"][name] for name in expected}, expected)
        assert found["batches_seen"] == ranks[0]["batches_seen"]
        assert found["after_fit"] == pytest.approx(ranks[0]["after_fit"])
    mean = sum(losses[per_epoch:]) / per_epoch  # all batches have as many samples
    assert ranks[0]["after_fit"]["train_loss_epoch"] == pytest.approx(mean, abs=1e-6)


# --- What replicas have besides their weights ------------------------------------------------------------------------

NORMED = Order(
    ranks=3,
    model="Normed",
    data=DATA,
    validation=False,
    strategy={"schedule": "1f1b", "split_points": ["norm"], "replicas": [2, 1], "num_microbatches": 2},
    trainer={"max_epochs": 1, "limit_train_batches": 1},
    seed=5,
)


@pytest.mark.parametrize("pipeline", [NORMED])
def test_statistics_of_batch_norm_are_the_mean_of_the_replicas(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    model = make("Normed", seed=5)
    statistics = []
    for half in ranks[0]["batches"][0][0].tensor_split(2):
        norm = torch.nn.BatchNorm1d(8)
        norm(model.first(half))
        statistics.append(norm.running_mean)
    assert not torch.allclose(*statistics, atol=1e-3)
    for found in ranks:
        mean = sum(statistics) / 2
        torch.testing.assert_close(found["weights"]["norm.running_mean"], mean.detach(), atol=1e-6, rtol=1e-5)
        assert found["weights"]["norm.num_batches_tracked"] == 1
