"""What was recorded for one kind of kernels is not recorded again for another, as long as it holds."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch.nn.functional as F

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


def noted(record: Callable[..., None], name: str, found: list[str]) -> Callable[..., None]:
    def recorded(*args: Any) -> None:
        found.append(name)
        record(*args)

    return recorded


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
    assert recordings == [*variants, "ArrayPart", "ArrayPart", *variants]


@pytest.mark.slow
def test_compiled_steps_of_a_recording_for_others_equal_separate_runs(recordings: list[str]) -> None:
    check_all_ways_are_timed_and_right(Weighed)
    assert len(recordings) == len(VARIANTS) + 1
