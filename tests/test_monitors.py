"""Monitors: their numbers are those of problems whose answer is known."""

import csv
import math
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from adaptive_tasks import MeanOf, samples
from lightning.pytorch.strategies import DDPStrategy
from pipedream_farm import Farm, Order
from torch.utils.data import DataLoader

from pl_pipe.adapt.estimates import NoiseScale, RunningMean
from pl_pipe.adapt.monitors import (
    GradientNoiseScale,
    GradientVariance,
    LinkThroughput,
    Monitor,
    PeerLatencies,
    PrometheusEndpoint,
    StepTime,
)
from pl_pipe.adapt.monitors.base import patience_of, samples_of
from pl_pipe.adapt.monitors.local_gradients import LocalGradients, share_of_squares, squared_length
from pl_pipe.adapt.policies import Policy
from pl_pipe.errors import ConfigError
from pl_pipe.strategies import FusionStrategy, PartialReduceStrategy, PipeDreamStrategy

pytest_plugins = "pipedream_plugin"

ALL = ["GradientNoiseScale", "GradientVariance", "StepTime", "PeerLatencies"]
DDP = Order("adaptive_tasks.monitored", ranks=3, kinds=ALL, steps=120)
ACCUMULATED = Order(
    "adaptive_tasks.monitored", ranks=2, kinds=["GradientNoiseScale"], steps=80, accumulate_grad_batches=2
)
STAR = Order("adaptive_tasks.monitored", ranks=3, kinds=["LinkThroughput", "GradientNoiseScale"], steps=12,
             strategy={"topology": "star"})  # fmt: skip
STAR_SELDOM = Order("adaptive_tasks.monitored", ranks=3, kinds=["LinkThroughput"], steps=12, every=2,
                    strategy={"topology": "star"})  # fmt: skip
TRUE_NOISE, TRUE_SIGNAL = 20 * 4.0, 20 * 0.25
"""Of MeanOf: the sum of the variances of x, and the squared length of w."""


def test_averages_begin_without_a_bias() -> None:
    mean = RunningMean(0.9)
    assert math.isnan(mean.value)
    for value in (4.0, 4.0, 4.0):
        mean.add(value)
        assert mean.value == pytest.approx(4.0)
    mean.add(8.0)
    assert 4.0 < mean.value < 6.0


@pytest.mark.parametrize(("ranks", "batch"), [(2, 4), (4, 8), (8, 1)])
def test_the_noise_scale_is_the_analytic_one(ranks: int, batch: int) -> None:
    size, sigma, draws = 64, 1.5, torch.Generator().manual_seed(ranks)
    true_gradient = torch.linspace(-1, 1, size, dtype=torch.float64)
    estimate = NoiseScale(keep=0.99, warmup=20)
    for _ in range(400):
        noise = torch.randn(ranks, batch, size, generator=draws, dtype=torch.float64) * sigma
        gradients = true_gradient + noise.mean(1)
        estimate.add(
            float(gradients.square().sum(1).mean()), float(gradients.mean(0).square().sum()),
            small=batch, large=ranks * batch,
        )  # fmt: skip
        if estimate.seen >= estimate.warmup:
            assert estimate.value > 0
    assert estimate.value == pytest.approx(size * sigma**2 / float(true_gradient.square().sum()), rel=0.2)


def test_an_estimate_skips_what_is_no_number_and_waits_for_its_warm_up() -> None:
    estimate = NoiseScale(warmup=2)
    estimate.add(math.inf, 1.0, small=1, large=2)
    estimate.add(math.nan, 1.0, small=1, large=2)
    estimate.add(2.0, 1.5, small=2, large=2)
    assert estimate.seen == 0
    estimate.add(2.0, 1.5, small=1, large=2)
    assert math.isnan(estimate.value)
    estimate.add(2.0, 1.5, small=1, large=2)
    assert estimate.value == pytest.approx(1.0)  # S = 0.5 / (1 - 1/2) = 1, |G|² = 2·1.5 - 2 = 1


def test_ranks_estimate_what_is_known(farm: Farm) -> None:
    job = farm.start(DDP)
    outcome = job.outcome
    for result in outcome:
        last = result["values"][-1]
        assert last["noise_scale"] == outcome[0]["values"][-1]["noise_scale"], "all ranks have the same number"
        assert last["noise_scale"] == pytest.approx(TRUE_NOISE / TRUE_SIGNAL, rel=0.2)
        assert all(one["noise_scale"] > 0 for one in result["values"][10:])
        assert result["hooks_left"] == 0
    for step, values in enumerate(outcome[0]["values"]):
        local = torch.stack([result["local"][step] for result in outcome]).double()
        expected = local.square().sum(1).mean() - local.mean(0).square().sum()
        assert values["gradient_variance"] == pytest.approx(float(expected), rel=1e-4)
    assert {"latency_0_1_ms", "latency_0_2_ms", "latency_1_2_ms"} <= outcome[0]["values"][0].keys()
    with (job.folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["noise_scale"]) for row in rows) == 120 - 9
    assert sum(bool(row["step_s"]) for row in rows) == 120
    assert sum(bool(row["latency_0_1_ms"]) for row in rows) == 2  # every hundred steps
    assert "pl_pipe_samples_per_s" in outcome[0]["scraped"]
    assert "pl_pipe_global_step 120.0" in outcome[0]["scraped"]


@pytest.mark.slow
def test_accumulated_batches_count_together(farm: Farm) -> None:
    for result in farm.start(ACCUMULATED).outcome:
        assert result["values"][-1]["noise_scale"] == pytest.approx(TRUE_NOISE / TRUE_SIGNAL, rel=0.25)


@pytest.mark.parametrize("order", [STAR, STAR_SELDOM], ids=["each step", "every other step"])
def test_links_are_measured_where_messages_are(farm: Farm, order: Order) -> None:
    for result in farm.start(order).outcome:
        (links,) = result["links"]
        sent = torch.tensor([[size_bytes for size_bytes, _ in row] for row in links])
        here = torch.tensor([[0.0, 80, 80], [80, 0, 0], [80, 0, 0]])  # 20 floats from and to rank 0
        if order is STAR:  # the step before may have been told late, and this one too late
            assert not sent[here == 0].any(), sent
            assert set(sent[here > 0].tolist()) <= {0.0, 80.0, 160.0}
        else:
            assert torch.equal(sent, here)
        names = {name for one in result["values"] for name in one if name.startswith("link_")}
        links_there = {f"link_{link}_mb_per_s" for link in ("0_1", "0_2", "1_0", "2_0")}
        assert names <= links_there, "one may be missing where clocks could not be read exactly"
        assert names


def trained(callback: Any, *, module: MeanOf | None = None, data: Any = None, **settings: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", callbacks=callback, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_steps": 150, **settings},
    )  # fmt: skip
    trainer.fit(module or MeanOf(), samples() if data is None else data)
    return trainer


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_one_rank_compares_successive_steps(interval: int) -> None:
    monitor = GradientNoiseScale(keep=0.98, interval=interval)
    trained(monitor, max_steps=150 * interval)
    assert monitor.noise_scale == pytest.approx(TRUE_NOISE / TRUE_SIGNAL, rel=0.25)
    assert not monitor._previous


def test_one_rank_compares_batches_of_different_sizes() -> None:
    """Of b samples a gradient has the noise S/b: (1, 0) and (0, 1) of 8 and 2 samples, whose mean is (1, 1)/2."""
    monitor, module = GradientNoiseScale(warmup=1), MeanOf(2)
    monitor._gradients = LocalGradients(module)
    for samples_, gradient in ((8, [1.0, 0.0]), (2, [0.0, 1.0])):
        monitor._samples, module.w.grad = samples_, torch.tensor(gradient, dtype=module.w.dtype)
        monitor._compare_steps()
    assert monitor.estimate.noise == pytest.approx((1 - 0.5) / ((1 / 8 + 1 / 2) / 2 - (1 / 8 + 1 / 2) / 4))


def test_gradients_that_are_no_numbers_have_no_variance() -> None:
    monitor = GradientVariance()
    monitor._gradients, monitor._trace = LocalGradients(MeanOf(1)), lambda _: math.nan  # type: ignore[method-assign]
    loop = SimpleNamespace(_should_accumulate=lambda: False)
    trainer: Any = SimpleNamespace(global_step=0, is_global_zero=True, loggers=[], fit_loop=loop)
    monitor.on_after_backward(trainer, None)  # type: ignore[arg-type]
    assert math.isnan(monitor.values["gradient_variance"])


def test_an_estimate_is_kept_in_checkpoints_and_begins_anew_with_another_training(tmp_path: Path) -> None:
    monitor = GradientNoiseScale()
    trained(monitor, max_steps=30).save_checkpoint(tmp_path / "kept.ckpt")
    resumed = GradientNoiseScale()
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[resumed], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=31,
    )  # fmt: skip
    trainer.fit(MeanOf(), samples(), ckpt_path=tmp_path / "kept.ckpt")
    assert resumed.estimate.seen == monitor.estimate.seen, "a first gradient has none before it to compare with"
    assert resumed.noise_scale == monitor.noise_scale
    trained(resumed, max_steps=5)
    assert resumed.estimate.seen == 4


@pytest.mark.parametrize("interval", ["x", 2.5, float("nan"), None, True])
def test_intervals_that_are_no_whole_numbers_are_refused(interval: Any) -> None:
    with pytest.raises(ConfigError, match=f"interval={interval!r} is no whole number"):
        StepTime(interval=interval)


def test_ranks_wait_for_each_other_as_long_as_the_strategy_has_them_wait() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(faults=SimpleNamespace(timeout_s=1234.0)))
    assert patience_of(trainer) == timedelta(seconds=1234)
    trainer = SimpleNamespace(strategy=DDPStrategy(timeout=timedelta(seconds=77)))
    assert patience_of(trainer) == timedelta(seconds=77)


@pytest.mark.parametrize("keep", [1.0, 1.5, -0.5])
def test_averages_that_keep_no_share_are_refused(keep: float) -> None:
    with pytest.raises(ConfigError, match=f"keep={keep} is no share of an average to keep"):
        GradientNoiseScale(keep=keep)


def test_ranks_whose_batches_differ_have_one_estimate() -> None:
    """A policy decides by it, alike on all ranks."""
    owns: list[torch.Tensor] = []

    def reduce(own: torch.Tensor, reduce_op: str) -> torch.Tensor:
        owns.append(own)
        return torch.stack(owns).mean(0)

    strategy = SimpleNamespace(reduce=reduce, root_device=torch.device("cpu"))
    for rank, (samples_, own) in enumerate(((8, 3.0), (4, 5.0))):
        trainer: Any = SimpleNamespace(strategy=strategy, world_size=2, global_rank=rank)
        monitor, module = GradientNoiseScale(warmup=1), MeanOf(1)
        module.w.grad = torch.full((1,), 1.5)
        monitor._samples, monitor._gradients = samples_, LocalGradients(module)
        monitor._gradients.squared = {"w": torch.tensor(own, dtype=torch.float64)}
        monitor._compare_ranks(trainer)
    expected = NoiseScale(warmup=1)
    expected.add(4.0, 2.25, small=2 / (1 / 8 + 1 / 4), large=4 / (1 / 8 + 1 / 4))
    assert monitor.noise_scale == pytest.approx(expected.value)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2, 4, 4), (2_500_000,), (1000, 2500)])
def test_lengths_are_those_of_float64(shape: tuple[int, ...], kind: torch.dtype) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
    as_stored = [gradient, *([gradient.to(memory_format=torch.channels_last), gradient.mT] if len(shape) == 4 else [])]
    for stored in as_stored:
        expected = float(gradient.double().square().sum())
        assert float(squared_length(stored)) == pytest.approx(expected, rel=2e-5)


def test_parameters_that_not_every_step_uses_are_compared_with_themselves() -> None:
    """Two in turn, of gradients (3, 0) and (0, 4), four samples each: their mean has a squared length of 6.25."""
    module = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(1)), "b": torch.nn.Parameter(torch.zeros(1))})
    monitor = GradientNoiseScale(warmup=1)
    monitor._gradients, monitor._samples = LocalGradients(module), 4
    for a, b in ((3.0, None), (None, 4.0)):
        module["a"].grad = None if a is None else torch.tensor([a])
        module["b"].grad = None if b is None else torch.tensor([b])
        monitor._compare_steps()
    expected = NoiseScale(warmup=1)
    expected.add(12.5, 6.25, small=4, large=8)
    assert monitor.estimate.noise == pytest.approx(expected.noise)
    assert monitor.estimate.signal == pytest.approx(expected.signal, abs=1e-9)


@pytest.mark.parametrize("monitor", [GradientNoiseScale(), StepTime()])
def test_batches_without_tensors_are_refused_with_a_remedy(monitor: Monitor) -> None:
    name = type(monitor).__name__
    with pytest.raises(ConfigError, match=rf"{name} counts a batch's samples, .* in object; .* or remove {name}"):
        samples_of(object(), monitor)


def test_a_batch_without_tensors_is_refused_before_its_step() -> None:
    with pytest.raises(ConfigError, match="GradientNoiseScale counts"):
        trained(GradientNoiseScale(), data=DataLoader(range(3), collate_fn=lambda _: object()))


def test_a_sparse_gradient_has_the_length_of_its_dense_one() -> None:
    """Rows that were looked up twice are there twice."""
    words = torch.nn.Embedding(9, 4, sparse=True)
    words(torch.tensor([1, 7, 1])).square().sum().backward()  # type: ignore[no-untyped-call]
    gradient = words.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert float(squared_length(gradient)) == pytest.approx(float(gradient.to_dense().square().sum()))


def test_gradients_may_be_of_float64() -> None:
    monitor = GradientNoiseScale(warmup=1)
    trained(monitor, max_steps=4, precision="64-true")
    assert math.isfinite(monitor.noise_scale)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_of_a_gradient_make_the_whole(ranks: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 2, bias=False))
    module[1].double()  # kinds may differ
    parameters = list(module.named_parameters())
    for _, one in parameters[:-1]:
        one.grad = torch.randn_like(one)
    shares = [share_of_squares(parameters, rank, ranks) for rank in range(ranks)]
    whole = sum(float(one.grad.double().square().sum()) for _, one in parameters[:-1] if one.grad is not None)
    assert float(sum(shares)) == pytest.approx(whole, rel=1e-6)


def test_steps_are_noted_by_rank_and_kept_from_run_to_run(tmp_path: Path) -> None:
    for _ in range(2):
        trained(StepTime(folder=tmp_path), max_steps=3)
    with (tmp_path / "rank0.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["workers"]) for row in rows] == [("0", "1"), ("1", "1"), ("2", "1")] * 2
    assert all(float(row["samples_per_s"]) > 0 for row in rows)
    assert sorted(row["ended_at_s"] for row in rows) == [row["ended_at_s"] for row in rows]


def test_elementwise_variances_need_several_ranks() -> None:
    with pytest.raises(ConfigError, match="compares the gradients of several ranks, and there is one"):
        trained(GradientVariance(elementwise=True))


def test_links_need_the_strategy_that_has_them() -> None:
    with pytest.raises(ConfigError, match="LinkThroughput watches the messages of strategy=adaptive"):
        trained(LinkThroughput())


@pytest.mark.parametrize("monitor", [GradientNoiseScale(), GradientVariance()])
@pytest.mark.parametrize("strategy", [PartialReduceStrategy, FusionStrategy, PipeDreamStrategy])
def test_gradients_that_are_not_one_whole_models_are_refused(monitor: Any, strategy: Any) -> None:
    """Among uneven workers each has its own, and the noise would be 0."""
    trainer: Any = SimpleNamespace(strategy=strategy.__new__(strategy), world_size=2)
    with pytest.raises(ConfigError, match=f"with their mean, which {strategy.__name__} does not have"):
        monitor.on_train_start(trainer, MeanOf())


@pytest.mark.parametrize("callback", [PeerLatencies(), Policy()])
def test_workers_that_do_not_wait_for_each_other_are_not_made_to_meet(callback: Any) -> None:
    trainer: Any = SimpleNamespace(strategy=PartialReduceStrategy(), world_size=2)
    with pytest.raises(ConfigError, match="the workers of PartialReduceStrategy do not wait for each other"):
        callback.on_train_start(trainer, MeanOf())


class TwoSteps(MeanOf):
    """One of each optimizer a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(2)]


@pytest.mark.parametrize(("interval", "expected"), [(1, 6), (2, 6), (4, 3), (5, 3)])
def test_steps_of_two_optimizers_are_measured_by_the_interval(tmp_path: Path, interval: int, expected: int) -> None:
    trained(StepTime(folder=tmp_path, interval=interval), module=TwoSteps(), max_steps=12)
    with (tmp_path / "rank0.csv").open() as file:
        assert len(list(csv.DictReader(file))) == expected


@pytest.mark.parametrize(("interval", "expected"), [(1, 6), (4, 3), (5, 2)])
def test_policies_are_asked_by_the_steps_of_all_optimizers(interval: int, expected: int) -> None:
    class Counts(Policy):
        asked = 0

        def decide(self, trainer: Any) -> None:
            self.asked += 1

    policy = Counts(interval=interval)
    policy.failed = True  # in an earlier fit
    trained(policy, module=TwoSteps(), max_steps=12)
    assert policy.asked == expected


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="StepTime: interval=0 is no number of steps"):
        StepTime(interval=0)


def test_one_rank_has_no_latencies_and_a_taken_port_is_said() -> None:
    trained(PeerLatencies(), max_steps=1)
    first = PrometheusEndpoint(port=0)

    class Second(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.set()
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{first.port}"):
                PrometheusEndpoint(port=first.port).on_train_start(trainer, trainer.lightning_module)

    seen = Event()
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[first, Second()], logger=False, enable_checkpointing=False, max_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(MeanOf(), samples())
    assert seen.is_set()
    with pytest.raises(ConfigError, match="port=99999 is none; choose one from 1 to 65535, or 0"):
        PrometheusEndpoint(port=99999)


def test_the_endpoint_takes_any_name_and_ends_with_a_run_that_fails() -> None:
    class Mine(Monitor):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.report(trainer, {"my/loss (mean)": 1.0})
            if trainer.global_step == 2:
                raise ValueError("no more")

    endpoint = PrometheusEndpoint(port=0)
    with pytest.raises(ValueError, match="no more"):
        trained([Mine(), endpoint])
    assert endpoint._gauges["my/loss (mean)"]._name == "pl_pipe_my_loss__mean_"
    assert endpoint._server is None
