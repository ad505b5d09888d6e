"""The executor against references of the published rules, written out below: ranks are threads, updates are exact.

`versions_of` says which weights each stage's layers must have for a mini-batch; everything else is a single process.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pl_pipe.comm import LocalNetwork
from pl_pipe.errors import StageError
from pl_pipe.runtime.executor import Executor
from pl_pipe.runtime.executor_settings import ExecutorSettings
from pl_pipe.runtime.mini_batch import MiniBatch, Update
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.runtime.whole_model import WholeModel
from pl_pipe.schedule import FLUSHING, reading_of
from pl_pipe.stages import Ownership, Pipe

TIMEOUT_S = 30


class Skips(nn.Module):
    """Convolutions (where a stashed weight must be the very tensor that autograd saved) and a skip over all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = first = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return h + first


class Recurrent(nn.Module):
    """Recurrent modules keep a second list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        for layer in self.layers:
            h, _ = layer(h)
        return h


class Tied(nn.Module):
    """The last layer uses the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


CASES = [pytest.param(make, stages, id=f"{make.__name__}-{stages}") for make, stages in
    [(Skips, 2), (Skips, 3), (Skips, 4), (Recurrent, 3), (Tied, 2), (Tied, 4)]]  # fmt: skip


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def owners_of(stages: int) -> dict[str, int]:
    """Four layers over two, three or four stages."""
    stage_of = {2: (0, 0, 1, 1), 3: (0, 1, 1, 2), 4: (0, 1, 2, 3)}[stages]
    return {f"layers.{index}": stage for index, stage in enumerate(stage_of)}


def settings_for(
    schedule: str, stages: int, stage: int, every: int, *, vertical_sync: bool = False
) -> ExecutorSettings:
    warmup = stages - 1 - stage
    late = schedule == "pipedream_2bw" or vertical_sync
    lag = stages - 1 if vertical_sync else None
    return ExecutorSettings(
        schedule=schedule,
        warmup=warmup,
        update_every=every,
        reading=reading_of(schedule, update_every=every, vertical_sync_warmup=lag),
        versioned=late or (warmup > 0 and schedule not in FLUSHING),
    )


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)


class Run:
    """What came of a run over threads."""

    def __init__(self, stages: int) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.peaks = [0] * stages
        self.errors: list[BaseException] = []


def run_pipeline(
    model: nn.Module,
    segments: Sequence[Sequence[Sequence[Tensor]]],
    schedule: str,
    stages: int,
    *,
    vertical_sync: bool = False,
    rates: Sequence[float] | None = None,
) -> Run:
    """Trains on `segments` of batches of micro-batches; the pipeline is drained after each segment."""
    every = len(segments[0][0])
    run, network = Run(stages), LocalNetwork(timeout_s=TIMEOUT_S / 3)

    def rank(stage: int) -> None:
        mine = copy.deepcopy(model)
        pipe = Pipe(mine, Ownership.from_mapping(mine, owners_of(stages)), stage=stage, transport=network.transport())
        optimizer = optimizer_for(mine.parameters())
        executor = Executor(
            stepper=pipe,
            parameters=dict(pipe.own_named_parameters()),
            settings=settings_for(schedule, stages, stage, every, vertical_sync=vertical_sync),
            numbers=StepNumbers(),
        )

        def apply(update: Update) -> None:
            executor.hand_over(update)
            executor.begin_update()
            optimizer.param_groups[0]["lr"] = update.settings
            optimizer.step()

        def mini_batch(x: Tensor, share: float) -> MiniBatch:
            def step(pipe_step: Any) -> Tensor:
                loss = loss_of(mine, x)
                if not loss.is_meta:
                    run.losses.append(loss.item())
                return loss * share

            return MiniBatch(x, step)

        count = 0
        for segment in segments:
            for batch in segment:
                rate = 0.3 if rates is None else rates[count]
                count += 1
                update = executor.advance([mini_batch(x, 1 / len(batch)) for x in batch], partial(float, rate))
                if update is not None:
                    apply(update)
            for update in executor.drain():
                apply(update)
            assert executor.is_drained
        run.peaks[stage] = executor.versions.peak
        run.weights.update({name: p.detach() for name, p in pipe.own_named_parameters()})

    def guarded(stage: int) -> None:
        try:
            rank(stage)
        except BaseException as error:
            run.errors.append(error)

    threads = [threading.Thread(target=guarded, args=(stage,), daemon=True) for stage in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not run.errors, run.errors
    assert not any(thread.is_alive() for thread in threads)
    assert not network.unread()
    return run


def reference(
    model: nn.Module,
    segments: Sequence[Sequence[Sequence[Tensor]]],
    stage_of: Callable[[str], int],
    version_of: Callable[[int, int], int],
    rates: Sequence[float] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process; for update n of a segment, stage s computes with the weights after `version_of(n, s)`."""
    model = copy.deepcopy(model)
    optimizer = optimizer_for(model.parameters())
    losses: list[float] = []
    count = 0
    for segment in segments:
        history = [_weights(model)]
        for number, batch in enumerate(segment):
            used = {
                name: history[version_of(number, stage_of(name))][name].clone().requires_grad_() for name in history[0]
            }
            for x in batch:
                loss = functional_loss(model, used, x)
                losses.append(loss.item())
                (loss / len(batch)).backward()
            for name, parameter in model.named_parameters():
                parameter.grad = used[name].grad
            optimizer.param_groups[0]["lr"] = 0.3 if rates is None else rates[count]
            count += 1
            optimizer.step()
            history.append(_weights(model))
    return losses, _weights(model)


def functional_loss(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """With these weights instead of the model's own; recurrent modules read a list that functional_call leaves out."""
    twin = copy.deepcopy(model)
    flat = [
        (module._flat_weights, index, f"{prefix}.{name}")
        for prefix, module in twin.named_modules()
        if isinstance(module, nn.RNNBase)
        for index, name in enumerate(module._flat_weights_names)
    ]
    for places, index, name in flat:
        places[index] = weights[name]
    return functional_call(_Loss(twin), {f"model.{name}": tensor for name, tensor in weights.items()}, (x,))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.model, x)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def home_in(stages: int) -> Callable[[str], int]:
    owners = owners_of(stages)
    return lambda name: owners[name.rpartition(".")[0]]


def batches_of(model: nn.Module, sizes: Sequence[Sequence[int]], parts: int, seed: int) -> list[list[list[Tensor]]]:
    """Segments of batches of `parts` micro-batches, the last batch of each segment smaller."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5,) if isinstance(model, Tied) else (3, 4)
    return [
        [[torch.randn(size, *shape, generator=generator) for _ in range(parts)] for size in segment]
        for segment in sizes
    ]


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def assert_equal(run: Run, losses: Sequence[float], weights: Mapping[str, Tensor]) -> None:
    assert run.losses == pytest.approx(losses, abs=1e-6, rel=0)
    assert run.weights.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(run.weights[name], weight, atol=1e-6, rtol=1e-6)


SIZES = [(4, 4, 4, 4, 4, 3), (4, 4, 2)]


@pytest.mark.parametrize(("make", "stages"), CASES)
def test_pipedream_updates_each_stage_with_its_own_delay(make: Callable[[], nn.Module], stages: int) -> None:
    """SOSP'19: w_s(t+1) = w_s(t) - v·∇f(w_0(t-n+1), …, w_n-1(t)): stage s computes n-1-s updates behind."""
    model = made(make, seed=stages)
    batches = batches_of(model, SIZES, 1, seed=stages)
    run = run_pipeline(model, batches, "pipedream", stages)
    expected = reference(model, batches, home_in(stages), lambda number, stage: max(0, number - (stages - 1 - stage)))
    assert_equal(run, *expected)
    assert run.peaks == [stages - stage for stage in range(stages)]  # warm-up + 1


@pytest.mark.parametrize(("make", "stages"), CASES)
def test_vertical_sync_gives_all_stages_one_version(make: Callable[[], nn.Module], stages: int) -> None:
    """SOSP'19: w(t+1) = w(t) - v·∇f(w_0(t-n+1), …, w_n-1(t-n+1))."""
    model = made(make, seed=stages)
    batches = batches_of(model, SIZES, 1, seed=stages)
    run = run_pipeline(model, batches, "pipedream", stages, vertical_sync=True)
    expected = reference(model, batches, home_in(stages), lambda number, _: max(0, number - (stages - 1)))
    assert_equal(run, *expected)
    assert max(run.peaks) == stages


@pytest.mark.parametrize(("make", "stages"), CASES)
def test_2bw_updates_all_stages_one_late(make: Callable[[], nn.Module], stages: int) -> None:
    """ICML'21: W(t+1) = W(t) - v·∇f(W(t-1))."""
    model = made(make, seed=stages)
    batches = batches_of(model, SIZES, 4, seed=stages)
    run = run_pipeline(model, batches, "pipedream_2bw", stages)
    assert_equal(run, *reference(model, batches, home_in(stages), lambda number, _: max(0, number - 1)))
    assert max(run.peaks) == 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("make", "stages"), CASES)
def test_flushing_schedules_are_gradient_descent(make: Callable[[], nn.Module], stages: int, schedule: str) -> None:
    model = made(make, seed=stages)
    batches = batches_of(model, SIZES, 3, seed=stages)
    run = run_pipeline(model, batches, schedule, stages)
    assert_equal(run, *reference(model, batches, home_in(stages), lambda number, _: number))
    assert run.peaks == [1] * stages


@pytest.mark.parametrize(("schedule", "late"), [("pipedream", None), ("pipedream_2bw", 1), ("1f1b", 0)])
def test_an_update_uses_the_settings_of_its_own_batch(schedule: str, late: int | None) -> None:
    model = made(Skips, seed=7)
    parts = 1 if schedule == "pipedream" else 4
    batches = batches_of(model, SIZES, parts, seed=7)
    rates = [0.5 / (1 + number) for number in range(sum(map(len, SIZES)))]
    run = run_pipeline(model, batches, schedule, 3, rates=rates)

    def version_of(number: int, stage: int) -> int:
        return max(0, number - (2 - stage if late is None else late))

    assert_equal(run, *reference(model, batches, home_in(3), version_of, rates))
    with pytest.raises(AssertionError):
        assert_equal(run, *reference(model, batches, home_in(3), version_of))


def test_a_share_of_fewer_mini_batches_ends_with_the_segment() -> None:
    """A last batch that has fewer micro-batches than the others is applied when the pipeline is drained."""
    model = made(Skips, seed=3)
    batches = batches_of(model, [(4, 4, 4)], 4, seed=3)
    batches[0][-1] = batches[0][-1][:2]
    for schedule, late in (("pipedream_2bw", 1), ("1f1b", 0), ("gpipe", 0)):
        run = run_pipeline(model, batches, schedule, 3)
        expected = reference(model, batches, home_in(3), lambda number, _, late=late: max(0, number - late))
        assert_equal(run, *expected)


# --- One rank alone -------------------------------------------------------------------------------------------------


class Stash:
    """Runs steps of a whole model with older weights, as a first stage would."""

    def __init__(self, model: nn.Module) -> None:
        from pl_pipe.stages.parameter_swap import ParameterSwap

        self._swap = ParameterSwap(model)

    def step(self, _number: int, _batch: Any = None, *, parameters: Mapping[str, Tensor] | None = None) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def running() -> Iterator[Any]:
            with self._swap.using(parameters or {}), WholeModel().step(0) as step:
                yield step

        return running()


def test_a_weight_used_past_its_module_is_refused() -> None:
    """It would be the newest version, whatever the mini-batch began with."""
    model = nn.Linear(2, 2)
    kept = model.weight
    executor = Executor(Stash(model), dict(model.named_parameters()), settings_for("pipedream", 2, 0, 1), StepNumbers())
    x = torch.ones(1, 2)
    batch = MiniBatch(x, lambda _: (model(x) @ kept).sum())
    assert executor.advance([batch]) is None
    with pytest.raises(StageError, match="uses weight past its module"):
        executor.advance([batch])


def test_frozen_weights_have_one_version() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    executor = Executor(Stash(model), dict(model.named_parameters()), settings_for("pipedream", 2, 0, 1), StepNumbers())
    memory = model.weight.data_ptr()
    for _ in range(4):
        update = executor.advance([MiniBatch(None, lambda _: model(torch.ones(1, 2)).sum())])
        if update is not None:
            assert update.gradients.keys() == {"bias"}
            executor.begin_update()
    assert model.weight.data_ptr() == memory
    assert executor.versions.peak == 2


def test_gradients_stay_until_the_next_ones() -> None:
    model = nn.Linear(2, 1)
    executor = Executor(WholeModel(), dict(model.named_parameters()), settings_for("1f1b", 1, 0, 2), StepNumbers())
    batch = MiniBatch(None, lambda _: model(torch.ones(1, 2)).sum() * 0.5)
    for _ in range(2):
        update = executor.advance([batch, batch])
        assert update is not None
        assert model.bias.grad is None
        executor.hand_over(update)
        assert model.bias.grad == torch.ones(1)
