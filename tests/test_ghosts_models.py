"""Whole models over stages, against the plain run: losses, gradients, parameters and buffers, bit for bit.

By default a dozen models that are quick here, each over 2, 3 and 4 stages; with PL_PIPE_ALL_MODELS=1 all of
tests/ghost_models.py (minutes).
"""

import os
from functools import cache

import pytest
from ghost_models import MODELS, Outcome, assert_close, assert_equal, piped_run, planned, single_run

QUICK = (
    *("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "vit_b_16", "swin_t", "swin_v2_t"),
    *("convnext_tiny", "maxvit", "lightning transformer", "seq2seq", "packed"),
)
NAMES = tuple(MODELS) if os.environ.get("PL_PIPE_ALL_MODELS") else QUICK
# The gradient of a permuted activation has other strides than in the single run, so sums run in another order.
NOT_TO_THE_BIT = {("convnext_tiny", 3), ("convnext_tiny", 4)}


@cache
def reference(name: str, seed: int = 0) -> Outcome:
    return single_run(MODELS[name], seed=seed)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_over_stages_equals_the_single_run(name: str, stages: int) -> None:
    piped = piped_run(MODELS[name], planned(MODELS[name], stages))
    if (name, stages) in NOT_TO_THE_BIT:
        assert_close(piped, reference(name))
    else:
        assert_equal(piped, reference(name))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["seq2seq", "lightning transformer"])
def test_other_seeds(name: str, seed: int) -> None:
    assert reference(name, seed).losses != reference(name).losses
    assert_equal(piped_run(MODELS[name], planned(MODELS[name], 3), seed=seed), reference(name, seed))


def test_a_wrong_answer_would_be_seen() -> None:
    """The comparison itself: another seed's training is not equal."""
    with pytest.raises(AssertionError):
        assert_equal(piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 2), seed=1), reference("seq2seq"))


@pytest.mark.parametrize("options", [{"announce": False}, {"leave_early": True}])
def test_options_change_nothing(options: dict[str, bool]) -> None:
    trial = MODELS["vit_b_16"]._replace(batches=MODELS["vit_b_16"].batches * 2)
    assert_equal(piped_run(trial, planned(trial, 3), **options), single_run(trial))
