"""A step is written down once: for all variants whose operations are the same, and for every kind of kernels."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pl_pipe.errors import ConfigError, FusionError
from pl_pipe.fusion.formulations import BATCHED, BRANCHES, SHARED_INPUT
from pl_pipe.fusion.replay import OperationsDifferError, follow, trace
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import recorded_parts
from pl_pipe.strategies.fusion.formulation_trial import FormulationTrial
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
    monkeypatch.setattr(recorded_parts._Recorded, "compile", lambda _, *, tunes: None)


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


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    ("ranked", "recorded"),
    [((SHARED_INPUT, BATCHED, BRANCHES), [BATCHED]), ((BRANCHES, BATCHED, SHARED_INPUT), [BRANCHES, BATCHED])],
)
def test_timed_layers_are_not_compiled(
    recordings: list[str], ranked: Sequence[str], recorded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An array is recorded for the compiler once more where what was quickest by itself is not the usual way."""
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path))
    monkeypatch.setattr("pl_pipe.strategies.fusion.array_steps._are_timed", lambda *_: True)
    monkeypatch.setattr("pl_pipe.fusion.timing._seconds", lambda way, _: 1 + ranked.index(way.args[0].name))
    told: list[str] = []
    record = recorded_parts.ArrayPart.record

    def listened(part: Any, *args: Any) -> None:
        record(part, *args)
        told.append(part.report.how("network.layers.4"))

    monkeypatch.setattr(recorded_parts.ArrayPart, "record", listened)
    check_all_ways_are_timed_and_right(Weighed)
    assert told == recorded
    assert recordings.count("ArrayPart") == len(recorded)


@pytest.mark.usefixtures("recordings", "without_compiler")
@pytest.mark.parametrize(("chosen", "way"), [("captured array", BRANCHES), ("compiled array", BATCHED)])
def test_what_is_told_of_layers_is_true_of_the_array_that_trains(
    chosen: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path))
    monkeypatch.setattr("pl_pipe.strategies.fusion.array_steps._are_timed", lambda *_: True)
    monkeypatch.setattr("pl_pipe.fusion.timing._seconds", lambda one, _: 1 + (one.args[0].name != BRANCHES))
    monkeypatch.setattr(FormulationTrial, "_taken", lambda _, one, *__: 1 + (one.name != chosen))
    fused = FusionStrategy(VARIANTS, compile=True)
    trainer(strategy=fused, max_epochs=6).fit(Weighed(), loader("perceptron"))
    facts = fused.fusion_facts
    assert facts is not None
    assert facts.chosen["training_step"] == chosen
    [line] = [line for line in facts.lines if line.startswith("network.layers.4")]
    assert line.split("linear")[1].lstrip().startswith(way)


@pytest.mark.parametrize(("asked", "tunes"), [("tuned", True), (True, False)])
def test_kernels_are_tuned_where_that_is_asked_for(asked: Any, tunes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    found: list[bool] = []

    def noticed(graph: Any, *_: Any, **__: Any) -> Any:
        found.append(config.coordinate_descent_tuning)
        return graph

    monkeypatch.setattr(compile_fx, "compile_fx", noticed)
    fused = FusionStrategy(VARIANTS, formulation="compiled branches", compile=asked)
    trainer(strategy=fused, max_epochs=1).fit(Weighed(), loader("perceptron"))
    assert set(found) == {tunes}
    assert not config.coordinate_descent_tuning


def test_another_word_for_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile=fast is unknown; choose true, false, tuned or auto"):
        FusionStrategy(VARIANTS, compile="fast")


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


class LogsOther(Weighed):
    """The variants' operations are the same, and what they log of them is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss, size = F.cross_entropy(out, batch[1]), out.pow(2).mean()
        self.log("shown", loss if self.hparams["lr"] > 0.05 else size)
        return loss + 0.1 * size


class Swallows(Weighed):
    """The error that says that operations differ is caught by the step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        try:
            out = out.exp() if self.hparams["lr"] < 0.05 else out.sin()
        except Exception:
            out = out.sin()
        return F.cross_entropy(out, batch[1])


class Sparse(Weighed):
    """Sparse tensors have no address by which they could be told from each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = torch.arange(len(batch[0]))
        shape = (len(places), len(places))
        near = torch.sparse_coo_tensor(torch.stack([places, places]), batch[0][:, 0], shape)
        far = torch.sparse_coo_tensor(torch.stack([places, places.flip(0)]), batch[0][:, 1], shape)
        return F.cross_entropy(torch.sparse.mm(near if self.hparams["lr"] > 0.05 else far, self(batch[0])), batch[1])


class Checkpointed(Weighed):
    """Its variants differ, and a second recording must not meet the hooks of the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weighed = checkpoint(lambda x: self(x) * self.hparams["lr"], batch[0], use_reentrant=False)
        return F.cross_entropy(weighed, batch[1])


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
        (LogsOther, VARIANTS, 3),
        (Swallows, VARIANTS, 3),
        (Sparse, VARIANTS, 3),
        (Checkpointed, VARIANTS, 3),
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
    running = trainer(strategy=fused)
    running.fit(module(), loader("perceptron"), loader("perceptron", shuffle=False))
    assert len(found) == times
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone, plain = module(**variant), trainer()
        plain.fit(alone, loader("perceptron"), loader("perceptron", shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


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


def test_inputs_that_share_memory_are_like_nothing_else() -> None:
    """In the next batch they may not."""
    weight, batch = torch.ones(3), torch.randn(3)
    inputs = [batch, batch.view_as(batch)]

    def step(given: Tensor) -> list[Tensor]:
        return [(given * weight).sum()]

    traced = trace(lambda: step(inputs[0]), state=[weight], inputs=inputs)
    with pytest.raises(OperationsDifferError):
        follow(lambda: step(inputs[1]), traced, state=[weight], inputs=inputs)


def test_which_earlier_result_an_operation_takes_is_compared() -> None:
    weight, other = torch.randn(3), torch.randn(3)

    def step(of: Tensor, *, swapped: bool) -> list[Tensor]:
        doubled, moved = of.exp(), of.sin()
        return [moved - doubled if swapped else doubled - moved]

    traced = trace(lambda: step(weight, swapped=False), state=[weight], inputs=[])
    follow(lambda: step(other, swapped=False), traced, state=[other], inputs=[])
    with pytest.raises(OperationsDifferError):
        follow(lambda: step(other, swapped=True), traced, state=[other], inputs=[])


class Lists(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + batch[1].tolist()[0])


class Arrays(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * float(np.asarray(batch[0]).max())


class Seeds(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.manual_seed(3)
        return F.cross_entropy(self(batch[0] + torch.rand_like(batch[0])), batch[1])


class DropsAgain(Weighed):
    """Checkpointing draws the same mask a second time, in the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = checkpoint(lambda x: F.dropout(self(x), 0.5), batch[0], use_reentrant=False)
        return F.cross_entropy(out, batch[1])


class DrawsFromTorchs(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(batch[0].shape, generator=torch.Generator().manual_seed(1), dtype=batch[0].dtype)
        return F.cross_entropy(self(batch[0] + noise), batch[1])


class OwnGenerator(Weighed):
    """Each variant has one, which goes on from step to step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.generators = [np.random.default_rng(0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + self.generators[0].random())


class OwnRandom(OwnGenerator):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.generators = [random.Random(3)]  # type: ignore[list-item]


class OwnTorchGenerator(Weighed):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * torch.rand((), generator=self.generator)


class OwnIterator(Weighed):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.factors = itertools.cycle([1.0, 0.5, 0.25])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * next(self.factors)


class OtherMemory(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = batch[0].detach().clone()
        factor.data = batch[0].exp()
        return F.cross_entropy(self(batch[0] * factor), batch[1])


class Counts(Weighed):
    """How many there are is in a shape, and different in another batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + len(batch[1][batch[1] < 5]))


class Unique(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * batch[1].unique().numel()


class HookReadsEpoch(Weighed):
    """In the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        out.register_hook(lambda gradient: gradient * (1 + self.current_epoch))
        return F.cross_entropy(out, batch[1])


class HookDraws(Weighed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        out.register_hook(lambda gradient: gradient * (1 + random.random()))
        return F.cross_entropy(out, batch[1])


class Reentrant(Weighed):
    """Its parameters are no inputs of the checkpoint: asked for their gradients, torch would give none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].detach().requires_grad_()
        return F.cross_entropy(checkpoint(self.forward, x, use_reentrant=True), batch[1])  # type: ignore[arg-type]


REFUSED: list[tuple[type[Weighed], str]] = [
    (Lists, r"reads numbers \(`.tolist\(\)`\)"),
    (Arrays, r"reads numbers \(`np.asarray"),
    (Seeds, "sets their state in between"),
    (DropsAgain, "sets their state in between"),
    (DrawsFromTorchs, "cannot be written down"),
    (OwnTorchGenerator, "cannot be written down"),
    (OwnGenerator, "a generator that is an attribute"),
    (OwnRandom, "a generator that is an attribute"),
    (OwnIterator, "take what comes next from 'factors'"),
    (OtherMemory, "gives a tensor other memory"),
    (Counts, "shapes that depend on numbers"),
    (Unique, "shapes that depend on numbers"),
    (HookReadsEpoch, "reads trainer.current_epoch"),
    (HookDraws, "draws from Python's or NumPy's"),
    (Reentrant, "has a reentrant checkpoint"),
]
IN_ARRAYS = [case for case in REFUSED if case[0] not in (Seeds, DropsAgain, Reentrant)]
"""Arrays that draw are refused for that alone; reentrant checkpoints are no obstacle to them."""


@pytest.mark.parametrize(
    ("formulation", "module", "why"),
    [*(("branches", *case) for case in REFUSED), *(("captured array", *case) for case in IN_ARRAYS)],
)
def test_what_a_replay_would_not_do_anew_is_refused(formulation: str, module: type[Weighed], why: str) -> None:
    fused = FusionStrategy(VARIANTS, formulation=formulation)
    with pytest.raises(FusionError, match=f"{why}.*formulation=auto"):
        trainer(strategy=fused).fit(module(), loader("perceptron"))


class Clips(Weighed):
    """Its own weights, in the step: whatever is tried and taken back must not clip them twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.mul_(0.9)
        return super().training_step(batch, batch_idx)


class ClipsByRate(Clips):
    """The variants turn out to differ after they have done so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.hparams["lr"])


class HookReadsRate(Weighed):
    """In the backward, where one module's Python runs for all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        out.register_hook(lambda gradient: gradient * (1 + self.hparams["lr"]))
        return F.cross_entropy(out, batch[1])


class OfItsClass(Weighed):
    """A setting of the class, which a hook changes for all."""

    factor = 1.0

    def on_train_epoch_start(self) -> None:
        type(self).factor = 1.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * self.factor


RECORDED = (Clips, ClipsByRate, HookReadsRate, OfItsClass)
ONLY_IN_PYTHON = (HookDraws, OwnGenerator, OwnRandom, OwnTorchGenerator, OwnIterator, Reentrant, Counts)


@pytest.mark.parametrize(
    ("formulation", "module"),
    [
        *itertools.product(("auto", "one by one"), (*RECORDED, *ONLY_IN_PYTHON)),
        *itertools.product(("branches",), RECORDED),
        *itertools.product(("captured array",), (Clips, OfItsClass)),  # the others read what differs
    ],
)
def test_what_is_not_refused_is_right(formulation: str, module: type[Weighed]) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS, formulation=formulation)
    trainer(strategy=fused).fit(module(), loader("perceptron"))
    for number, variant in enumerate(VARIANTS):
        L.seed_everything(1, verbose=False)
        alone = module(**variant)
        trainer().fit(alone, loader("perceptron"))
        assert difference(alone, fused.variants[number]) <= 1e-9, number


def test_a_sparse_buffer_is_refused_by_name() -> None:
    class Graph(Weighed):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.register_buffer("adjacency", torch.eye(8, dtype=torch.float64).to_sparse())

    fused = FusionStrategy(VARIANTS, formulation="branches")
    with pytest.raises(FusionError, match="the buffer adjacency is sparse"):
        trainer(strategy=fused).fit(Graph(), loader("perceptron"))
    one_by_one = FusionStrategy(VARIANTS)
    trainer(strategy=one_by_one).fit(Graph(), loader("perceptron"))
    assert one_by_one.fusion_facts is not None
    assert one_by_one.fusion_facts.chosen["training_step"] == "one by one"
