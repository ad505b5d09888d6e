"""A step is written down once: for all variants whose operations are the same, and for every kind of kernels."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.replay import OperationsDifferError, follow, trace
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import recorded_parts
from pl_pipe.strategies.fusion.step_ways import StepWays
from tests.fused_modules import Classifier, difference, loader, trainer

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.03, "weight_decay": 0.05}]


class Weighed(Classifier):
    """`weigh_anew` is the step at whose beginning a hook changes a setting that the step reads."""

    weigh_anew = -1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.weight = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.weigh_anew:
            self.weight = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss * self.weight


class WeighedAnew(Weighed):
    """While `captured array` is timed, steps 5 to 9; `branches` have been."""

    weigh_anew = 6


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of parts that were recorded, in a trial of all four ways as on a GPU."""
    monkeypatch.setattr(StepWays, "is_replayed", lambda _, hook: hook == "training_step")
    monkeypatch.setattr("pl_pipe.strategies.fusion.step_ways._SLOWER_ARRAY", 0.0)
    found: list[str] = []
    for kind in (recorded_parts.VariantPart, recorded_parts.ArrayPart):
        monkeypatch.setattr(kind, "record", noted(kind.record, kind.__name__, found))
    return found


def noted(function: Callable[..., Any], name: str, found: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        found.append(name)
        return function(*args, **options)

    return called


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts go on with the operations that were recorded."""
    monkeypatch.setattr(recorded_parts._Recorded, "compile", lambda _: None)


def check_all_ways_are_timed_and_right(module: type[Weighed]) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS, compile=True)
    trainer(strategy=fused, max_epochs=6).fit(module(), loader("perceptron"), loader("perceptron", shuffle=False))
    facts = fused.fusion_facts
    assert facts is not None
    ways = {"branches", "captured array", "compiled branches", "compiled array"}
    assert set(facts.step_s["training_step"]) == ways
    for number, variant in enumerate(VARIANTS):
        L.seed_everything(1, verbose=False)
        alone = module(**variant)
        trainer(max_epochs=6).fit(alone, loader("perceptron"), loader("perceptron", shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number


@pytest.mark.usefixtures("without_compiler")
def test_a_step_is_recorded_once_for_branches_and_once_for_the_array(recordings: list[str]) -> None:
    check_all_ways_are_timed_and_right(Weighed)
    assert recordings == ["VariantPart"] * len(VARIANTS) + ["ArrayPart"]


@pytest.mark.usefixtures("without_compiler")
def test_a_recording_that_no_longer_holds_is_not_taken_over(recordings: list[str]) -> None:
    check_all_ways_are_timed_and_right(WeighedAnew)
    variants = ["VariantPart"] * len(VARIANTS)
    until_chosen = [*variants, "ArrayPart", "ArrayPart", *variants]
    assert recordings[: len(until_chosen)] == until_chosen  # and once more, should `branches` be the quickest


@pytest.mark.slow
def test_compiled_steps_of_a_recording_for_others_equal_separate_runs(recordings: list[str]) -> None:
    check_all_ways_are_timed_and_right(Weighed)
    assert len(recordings) == len(VARIANTS) + 1


class Offset(Weighed):
    """A plain tensor, no buffer, which each variant has its own of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.offset = torch.full((), 3 * self.hparams["lr"], dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) * self.offset, batch[1])


class Branching(Weighed):
    """The first variant of VARIANTS goes another way than the second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        low, high = out, out.detach() * 2
        if self.hparams["lr"] > 0.05:
            low, high = high, low
        return F.cross_entropy(low - 0.5 * high, batch[1])


OWN_DROPOUT = [{"lr": 0.1, "dropout": 0.2}, {"lr": 0.1, "dropout": 0.5}]
SAME_DROPOUT = [{"lr": 0.1, "dropout": 0.2}, {"lr": 0.3, "dropout": 0.2}, {"lr": 0.01, "dropout": 0.2}]


@pytest.mark.parametrize(
    ("module", "variants", "times"),
    [
        (Weighed, VARIANTS, 1),
        (Weighed, SAME_DROPOUT, 1),
        (Weighed, OWN_DROPOUT, 3),
        (Offset, VARIANTS, 2),
        (Branching, VARIANTS, 3),
    ],
)
def test_steps_that_are_alike_are_written_down_once(
    monkeypatch: pytest.MonkeyPatch, module: type[Weighed], variants: list[dict[str, Any]], times: int
) -> None:
    """Where they turn out to differ, each is: the first one twice."""
    found: list[str] = []
    monkeypatch.setattr(recorded_parts, "trace", noted(trace, "traced", found))
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation="branches")
    trainer(strategy=fused).fit(module(), loader("perceptron"), loader("perceptron", shuffle=False))
    assert len(found) == times
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone = module(**variant)
        trainer().fit(alone, loader("perceptron"), loader("perceptron", shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number


def steps(weights: list[Tensor]) -> dict[str, Callable[[], list[Tensor]]]:
    first, second = weights
    return {
        "as it was": lambda: [(first * 2 + second).sum()],
        "another number": lambda: [(first * 3 + second).sum()],
        "another operation": lambda: [(first * 2 - second).sum()],
        "another parameter": lambda: [(second * 2 + first).sum()],
        "another tensor": lambda: [((first * 2).add_(0) + first).sum()],
        "one more": lambda: [(first * 2 + second).sum() + 1],
        "one less": lambda: [first * 2 + second],
    }


@pytest.mark.parametrize("name", steps([torch.ones(3), torch.ones(3)]))
def test_operations_are_compared_with_those_that_were_written_down(name: str) -> None:
    weights, others = [torch.randn(3), torch.randn(3)], [torch.randn(3), torch.randn(3)]
    traced = trace(steps(weights)["as it was"], state=weights, inputs=[])
    if name == "as it was":
        followed = follow(steps(others)[name], traced, state=others, inputs=[])
        assert followed.graph is traced.graph
        assert torch.equal(followed.values[0], traced.graph(*others)[0])
        return
    with pytest.raises(OperationsDifferError):
        follow(steps(others)[name], traced, state=others, inputs=[])


def test_which_earlier_result_an_operation_takes_is_compared() -> None:
    weight, other = torch.randn(3), torch.randn(3)

    def step(of: Tensor, *, swapped: bool) -> list[Tensor]:
        doubled, moved = of.exp(), of.sin()
        return [moved - doubled if swapped else doubled - moved]

    traced = trace(lambda: step(weight, swapped=False), state=[weight], inputs=[])
    follow(lambda: step(other, swapped=False), traced, state=[other], inputs=[])
    with pytest.raises(OperationsDifferError):
        follow(lambda: step(other, swapped=True), traced, state=[other], inputs=[])
