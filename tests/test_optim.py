"""Learning-rate policies against the originals' own formulas."""

import pytest
import torch

from pl_pipe.errors import ConfigError
from pl_pipe.recipes.optim import lr_factor, make_optimizer, make_scheduler

POLICY = {"warmup_epochs": 0.0, "gamma": 0.1, "step_epochs": 30, "power": 2.0}


def pipedream_factor(policy: str, epoch: int, step: int, *, epoch_length: int, epochs: int, warmup: bool) -> float:
    """PipeDream's `adjust_learning_rate`, term by term, divided by the stage's base rate."""
    if warmup and epoch < 5:
        return float(1 + step + epoch * epoch_length) / (5.0 * epoch_length)
    if policy == "step":
        return 0.1 ** (epoch // 30)
    if policy == "polynomial":
        return (1.0 - float(epoch) / float(epochs)) ** 2.0
    assert policy == "exponential"
    return 0.97 ** (float(epoch) / float(epochs))


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("policy", ["step", "polynomial", "exponential"])
def test_policies_are_pipedreams(policy: str, warmup: bool) -> None:
    epochs, length = 90, 7
    settings = POLICY | {"warmup_epochs": 5.0 if warmup else 0.0, "gamma": 0.97 if policy == "exponential" else 0.1}
    for step in range(epochs * length):
        ours = lr_factor(step, policy=policy, steps_per_epoch=length, epochs=epochs, **settings)  # type: ignore[arg-type]
        epoch, inner = divmod(step, length)
        theirs = pipedream_factor(policy, epoch, inner, epoch_length=length, epochs=epochs, warmup=warmup)
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_past_the_end_the_last_epoch_stays() -> None:
    at_end = [lr_factor(step, policy="polynomial", steps_per_epoch=4, epochs=3, **POLICY) for step in (11, 12, 40)]  # type: ignore[arg-type]
    assert at_end == [pytest.approx(1 / 9)] * 3


def test_scheduler_applies_the_factor_each_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make_scheduler(
        optimizer, steps_per_epoch=2, epochs=4, policy="polynomial", **(POLICY | {"warmup_epochs": 1.0})
    )
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 1.125, 1.125, 0.5, 0.5, 0.125, 0.125])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adadelta"])
def test_optimizers_take_their_settings(name: str) -> None:
    optimizer = make_optimizer(name, [torch.nn.Parameter(torch.zeros(1))], lr=0.3, momentum=0.7, weight_decay=0.01)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.01)
    assert group.get("momentum") == (0.7 if name == "sgd" else None)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer=lion is unknown; choose one of sgd, adam"):
        make_optimizer("lion", [], lr=1, momentum=0, weight_decay=0)
    with pytest.raises(ConfigError, match=r"lr_policy=cosine is unknown; choose one of constant"):
        lr_factor(0, policy="cosine", steps_per_epoch=1, epochs=1, **POLICY)  # type: ignore[arg-type]
