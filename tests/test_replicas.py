"""Replicated stages: the executor over threads against references of the rules, and the parts that replicas share.

A stage with r replicas gives mini-batch k to replica k mod r. A round is R = lcm(replicas) mini-batches. With `every`
mini-batches to an update (R, or r with update=minibatch), and w forwards of warm-up, mini-batch k meets on its replica
the weights after  max(0, r * (k // r - w) // every)  updates; an update takes the mean of its mini-batches' gradients.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from test_executor import Recurrent, Run, Skips, Tied, assert_equal, functional_loss, home_in, loss_of, made, owners_of
from test_executor import optimizer_for as optimizer_of
from test_schedule import plan_of
from torch import Tensor, nn

from pl_pipe.comm import LocalNetwork, LocalSums
from pl_pipe.errors import ConfigError, StageError
from pl_pipe.partition import Plan
from pl_pipe.runtime.executor import Executor
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.runtime.mini_batch import MiniBatch, Update
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.schedule import warmups
from pl_pipe.stages import Ownership, Pipe
from pl_pipe.strategies.pipeline.settings import PipelineSettings

TIMEOUT_S = 30
SHAPES = [(2,), (4,), (2, 1), (1, 2), (3, 1), (2, 2), (2, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
SEGMENTS = (7, 6, 1)
"""Mini-batches until the pipeline is drained: rounds that are whole, and rounds that are not."""


class Shifted(nn.Linear):
    """Makes a table when it is first called, as positional encodings do, and a scale for each width."""

    table: Tensor | None = None

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.scales: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(-1, 1, x.shape[-1], device=x.device)
        width = x.shape[-1]
        if width not in self.scales:
            self.scales[width] = x.new_full((width,), 0.5)
        return super().forward(x) + self.table * self.scales[width]


class MadeLate(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted(5, 5) for _ in range(4))


def batches_of(model: nn.Module, segments: Sequence[int], seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (5,) if isinstance(model, Tied) else (3, 4)
    return [[torch.randn(4 - k % 2, *shape, generator=generator) for k in range(count)] for count in segments]


def home(name: str, stages: int) -> int:
    return home_in(stages)(name) if stages > 1 else 0


def run_replicas(
    model: nn.Module,
    plan: Plan,
    settings: PipelineSettings,
    segments: Sequence[Sequence[Tensor]],
    *,
    micro_batches: int = 1,
    accumulate: int = 1,
    rates: Sequence[float] | None = None,
) -> Run:
    """Trains over threads; each segment's mini-batches come `micro_batches` at a time."""
    stages = len(plan.stages)
    owners = owners_of(stages) if stages > 1 else {f"layers.{index}": 0 for index in range(4)}
    run, network = Run(plan.ranks), LocalNetwork(timeout_s=TIMEOUT_S / 3)
    sums = [LocalSums(stage.replicas, timeout_s=TIMEOUT_S / 3) for stage in plan.stages]
    losses: dict[int, float] = {}
    finals: list[list[dict[str, Tensor]]] = [[] for _ in plan.stages]

    def rank(stage: int, place: int, number: int) -> None:
        mine = copy.deepcopy(model)
        pipe = Pipe(mine, Ownership.from_mapping(mine, owners), stage=stage, transport=network.transport())
        optimizer = optimizer_of(mine.parameters())
        executor = Executor(
            stepper=pipe,
            parameters=dict(pipe.own_named_parameters()),
            settings=settings.for_rank(plan, number, accumulate=accumulate),
            numbers=StepNumbers(round_size=plan.round, reporters=plan.stages[-1].replicas),
            averaging=GradientAveraging(sums[stage].replica(place), bucket_bytes=100)
            if plan.stages[stage].replicas > 1
            else None,
        )

        def apply(update: Update) -> None:
            executor.hand_over(update)
            executor.begin_update()
            optimizer.param_groups[0]["lr"] = update.settings
            optimizer.step()

        def mini_batch(x: Tensor, k: int) -> MiniBatch:
            def step(pipe_step: Any) -> Tensor:
                loss = loss_of(mine, x)
                if not loss.is_meta:
                    losses[k] = loss.item()
                return loss / micro_batches / accumulate

            return MiniBatch(x, step)

        count = 0
        for segment in segments:
            for start in range(0, len(segment), micro_batches):
                arriving = segment[start : start + micro_batches]
                rate = 0.3 if rates is None else rates[count // micro_batches]
                update = executor.advance(
                    [mini_batch(x, count + i) for i, x in enumerate(arriving)], partial(float, rate)
                )
                count += len(arriving)
                if update is not None:
                    apply(update)
            for update in executor.drain():
                apply(update)
            assert executor.is_drained
        run.peaks[number] = executor.versions.peak
        finals[stage].append({name: p.detach() for name, p in pipe.own_named_parameters()})

    def guarded(*args: int) -> None:
        try:
            rank(*args)
        except BaseException as error:
            run.errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(index, place, number), daemon=True)
        for index, stage in enumerate(plan.stages)
        for place, number in enumerate(stage.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not run.errors, run.errors
    assert not any(thread.is_alive() for thread in threads)
    assert not network.unread()
    for weights in finals:
        for other in weights[1:]:
            for name, weight in weights[0].items():
                assert torch.equal(weight, other[name]), f"replicas have parted: {name}"
        run.weights.update(weights[0])
    run.losses = [losses[k] for k in range(len(losses))]
    return run


def reference(
    model: nn.Module,
    segments: Sequence[Sequence[Tensor]],
    stages: int,
    every: Sequence[int],
    version_of: Callable[[int, int], int],
    *,
    averaged: Sequence[int] | None = None,
    shares: float = 1.0,
    rates: Sequence[float] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """One process. On stage s, `every[s]` mini-batches share an update, and mini-batch k sees version_of(k, s)."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    stage_of = {name: home(name, stages) for name in named}
    optimizers = [optimizer_of([p for n, p in named.items() if stage_of[n] == stage]) for stage in range(stages)]
    losses: list[float] = []
    averaged = every if averaged is None else averaged
    base = 0

    def apply(stage: int, gradients: Sequence[Mapping[str, Tensor]], rate: float) -> dict[str, Tensor]:
        for name, parameter in named.items():
            if stage_of[name] == stage:
                parts = [part[name] for part in gradients if name in part]
                parameter.grad = sum(parts) * shares / min(averaged[stage], len(gradients)) if parts else None
        optimizers[stage].param_groups[0]["lr"] = rate
        optimizers[stage].step()
        return _weights(named, stage_of, stage)

    for segment in segments:
        history = [[_weights(named, stage_of, stage)] for stage in range(stages)]
        gradients: list[dict[str, Tensor]] = []
        rate = [0.3] * len(segment) if rates is None else rates[base : base + len(segment)]
        for k, x in enumerate(segment):
            # Updates that this mini-batch's versions need have all their gradients by now.
            used = {
                name: history[stage_of[name]][version_of(k, stage_of[name])][name].clone().requires_grad_()
                for name in named
            }
            loss = functional_loss(model, used, x)
            losses.append(loss.item())
            loss.backward()
            gradients.append({name: tensor.grad for name, tensor in used.items() if tensor.grad is not None})
            for stage in range(stages):
                if (k + 1) % every[stage] == 0:
                    first = k + 1 - every[stage]
                    history[stage].append(apply(stage, gradients[first:], rate[first]))
        for stage in range(stages):
            rest = len(segment) % every[stage]
            if rest:
                apply(stage, gradients[-rest:], rate[len(segment) - rest])
        base += len(segment)
    return losses, {name: p.detach().clone() for name, p in named.items()}


def _weights(named: Mapping[str, nn.Parameter], stage_of: Mapping[str, int], stage: int) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items() if stage_of[name] == stage}


def named_shape(shape: tuple[int, ...]) -> str:
    return "-".join(map(str, shape))


@pytest.mark.parametrize("update", ["round", "minibatch"])
@pytest.mark.parametrize("shape", SHAPES, ids=named_shape)
def test_pipedream_with_replicas_equals_its_rule(shape: tuple[int, ...], update: Any) -> None:
    plan = plan_of(shape)
    model = made(Skips, seed=sum(shape))
    batches = batches_of(model, SEGMENTS, seed=len(shape))
    every = [plan.round if update == "round" else replicas for replicas in shape]

    def version_of(k: int, stage: int) -> int:
        replicas, warmup = shape[stage], warmups(plan)[stage]
        return max(0, replicas * (k // replicas - warmup) // every[stage])

    run = run_replicas(model, plan, PipelineSettings(update=update), batches)
    assert_equal(run, *reference(model, batches, len(shape), every, version_of))


@pytest.mark.parametrize("make", [Recurrent, Tied, MadeLate])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=named_shape)
def test_recurrent_and_tied_weights_and_tables_made_late(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plan = plan_of(shape)
    model = made(make, seed=1)
    batches = batches_of(model, SEGMENTS, seed=1)

    def version_of(k: int, stage: int) -> int:
        return max(0, shape[stage] * (k // shape[stage] - warmups(plan)[stage]) // plan.round)

    run = run_replicas(model, plan, PipelineSettings(), batches)
    assert_equal(run, *reference(model, batches, len(shape), [plan.round] * len(shape), version_of))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (3, 1), (1, 2, 1)], ids=named_shape)
def test_vertical_sync_with_replicas(shape: tuple[int, ...]) -> None:
    plan = plan_of(shape)
    model = made(Skips, seed=2)
    batches = batches_of(model, SEGMENTS, seed=2)
    lag = warmups(plan)[0] * shape[0]
    run = run_replicas(model, plan, PipelineSettings(vertical_sync=True), batches)
    expected = reference(
        model, batches, len(shape), [plan.round] * len(shape), lambda k, _: max(0, k - lag) // plan.round
    )
    assert_equal(run, *expected)


@pytest.mark.parametrize(("schedule", "late"), [("1f1b", 0), ("gpipe", 0), ("pipedream_2bw", 1)])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 1)], ids=named_shape)
def test_micro_batches_over_replicas(shape: tuple[int, ...], schedule: str, late: int) -> None:
    """Gradient descent for the flushing schedules; also where a last batch leaves replicas without a part."""
    plan = plan_of(shape)
    model = made(Skips, seed=3)
    count = 2 * plan.round * len(shape)
    batches = batches_of(model, (3 * count, 2 * count, 1), seed=3)
    settings = PipelineSettings(schedule=schedule, num_microbatches=count)
    run = run_replicas(model, plan, settings, batches, micro_batches=count)
    expected = reference(
        model,
        batches,
        len(shape),
        [count] * len(shape),
        lambda k, _: max(0, k // count - late),
        averaged=[1] * len(shape),
        shares=1 / count,
    )
    assert_equal(run, *expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_that_no_round_divides(schedule: str) -> None:
    """Five micro-batches over two and three replicas: which one begins changes from batch to batch."""
    plan = plan_of((2, 3))
    model = made(Skips, seed=4)
    batches = batches_of(model, (15, 8), seed=4)
    settings = PipelineSettings(schedule=schedule, num_microbatches=5)
    run = run_replicas(model, plan, settings, batches, micro_batches=5)
    expected = reference(model, batches, 2, [5, 5], lambda k, _: k // 5, averaged=[1, 1], shares=1 / 5)
    assert_equal(run, *expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=named_shape)
def test_accumulated_rounds_share_an_update(shape: tuple[int, ...]) -> None:
    plan = plan_of(shape)
    model = made(Skips, seed=5)
    batches = batches_of(model, (8, 6), seed=5)
    every = 2 * plan.round

    def version_of(k: int, stage: int) -> int:
        return max(0, shape[stage] * (k // shape[stage] - warmups(plan)[stage]) // every)

    run = run_replicas(model, plan, PipelineSettings(), batches, accumulate=2)
    expected = reference(model, batches, 2, [every] * 2, version_of, averaged=[plan.round] * 2, shares=1 / 2)
    assert_equal(run, *expected)


def test_an_update_has_the_rate_of_its_first_mini_batch() -> None:
    plan = plan_of((2, 2))
    model = made(Skips, seed=6)
    batches = batches_of(model, (8, 3), seed=6)
    rates = [0.5 / (1 + k) for k in range(11)]

    def version_of(k: int, stage: int) -> int:
        return max(0, k // 2 - warmups(plan)[stage])

    run = run_replicas(model, plan, PipelineSettings(), batches, rates=rates)
    assert_equal(run, *reference(model, batches, 2, [2, 2], version_of, rates=rates))


# --- Parts ----------------------------------------------------------------------------------------------------------


def test_numbers_give_every_replica_its_turn() -> None:
    numbers = StepNumbers(round_size=6, reporters=2)
    numbers.begin_round()
    assert [numbers.trained() for _ in range(4)] == [0, 1, 2, 3]
    assert [numbers.evaluated() for _ in range(3)] == [4, 6, 8]
    numbers.begin_round()
    assert numbers.trained() == 12


def averagings(count: int, **options: Any) -> list[GradientAveraging]:
    sums = LocalSums(count, timeout_s=5)
    return [GradientAveraging(sums.replica(place), **options) for place in range(count)]


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Runs actions in threads."""
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return results


def test_gradients_of_any_types_and_places_are_averaged() -> None:
    weights = {
        "used": torch.ones(3),
        "double": torch.ones(2, 2, dtype=torch.float64),
        "once": torch.ones(2),
        "never": torch.ones(1),
    }

    def gradients(factor: float) -> dict[str, Tensor]:
        found = {"used": torch.full((3,), factor), "double": torch.full((2, 2), factor, dtype=torch.float64)}
        return {**found, "once": torch.full((2,), factor)} if factor == 3.0 else found

    first, second = averagings(2, bucket_bytes=8)
    results = together(
        lambda: first.finish(weights, gradients(1.0), mini_batches=1, averaged=2),
        lambda: second.finish(weights, gradients(3.0), mini_batches=1, averaged=2),
    )
    for result in results:
        assert result.keys() == {"used", "double", "once"}
        assert result["used"].tolist() == [2.0] * 3
        assert result["double"].tolist() == [[2.0] * 2] * 2
        assert result["double"].dtype == torch.float64
        assert result["once"].tolist() == [1.5] * 2


def test_buckets_leave_while_backward_runs() -> None:
    """The bucket of the later layers is under way when an earlier layer's gradient comes."""
    first, second = averagings(2, bucket_bytes=1)
    seen: list[list[bool]] = []

    def backward(averaging: GradientAveraging) -> Any:
        weights = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(2, requires_grad=True)}
        averaging.watch(weights)
        h = weights["a"] * 2
        h.register_hook(lambda _: seen.append([bucket.sum is not None for bucket in averaging._buckets]))
        (h * weights["b"]).sum().backward()
        gradients = {name: weight.grad for name, weight in weights.items()}
        return averaging.finish(weights, gradients, mini_batches=1, averaged=1)

    results = together(lambda: backward(first), lambda: backward(second))
    assert [result["a"].tolist() for result in results] == [[4.0, 4.0]] * 2
    assert all(any(sent) and not all(sent) for sent in seen), seen


@pytest.mark.parametrize(
    ("megabytes", "count"),
    [pytest.param(16, 5, id="small"), pytest.param(1, 1, id="tiny"), pytest.param(256, 16, id="large")],
)
def test_there_are_several_buckets_even_of_little(megabytes: int, count: int) -> None:
    """Or the first would leave when backward is over; it is the smallest, to leave soon. A tiny stage is not worth
    dividing, a large one has more."""
    weights = {str(number): torch.empty(megabytes << 14, device="meta", requires_grad=True) for number in range(16)}
    (alone,) = averagings(1)
    alone.watch(weights)
    assert len(alone._buckets) == count
    assert count == 1 or len(alone._buckets[0].names) == 1


def test_a_second_gradient_of_one_backward_is_refused() -> None:
    (alone,) = averagings(1, bucket_bytes=1)
    weights = {"a": torch.ones(2, requires_grad=True)}
    alone.watch(weights)
    weights["a"].sum().backward()
    with pytest.raises(StageError, match="a got a gradient a second time"):
        weights["a"].sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"update": "sometimes"}, "update=sometimes is unknown; choose one of minibatch, round"),
        ({"update": "minibatch", "vertical_sync": True}, "update=minibatch and vertical_sync=true"),
        ({"update": "minibatch", "schedule": "1f1b"}, "schedule=1f1b updates once for every batch"),
        ({"recompute": "false"}, "recompute='false'; give true or false"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_options_of_replicas(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelineSettings(**options)


def test_every_replica_needs_a_micro_batch() -> None:
    with pytest.raises(
        ConfigError, match=r"num_microbatches=2, but schedule=1f1b over 3-1 has a stage with 3 replicas"
    ):
        PipelineSettings(schedule="1f1b", num_microbatches=2).for_rank(plan_of((3, 1)), 0)
