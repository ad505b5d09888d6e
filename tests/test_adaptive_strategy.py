"""`strategy="adaptive"`: equal to DDP over every topology, and while topologies change."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from adaptive_tasks import MeanOf, samples
from pipedream_farm import Farm, Order
from torch.nn.parallel import DistributedDataParallel

from pl_pipe.adapt.policies import InterferencePolicy
from pl_pipe.comm.topology.adaptable import chosen
from pl_pipe.comm.topology.choice import candidates, topology_of
from pl_pipe.errors import ConfigError
from pl_pipe.strategies import AdaptiveCommStrategy

pytest_plugins = "pipedream_plugin"


def order(ranks: int = 3, **options: Any) -> Order:
    return Order("adaptive_tasks.fit", ranks=ranks, **options)


def pair(ranks: int, topology: Any, **options: Any) -> tuple[Order, Order]:
    settings = {"topology": topology, **options.pop("strategy", {})}
    return order(ranks, strategy=settings, **options), order(ranks, strategy="ddp", **options)


# The loader's last batch is smaller than the others.
EQUAL = {
    "native": pair(2, "native"),
    "ring": pair(3, "ring"),
    "star": pair(2, "star", optimizer="adamw", seed=3),
}
EQUAL_TOO = {
    "fathers": pair(3, [1, 1, 0], scheduler="step", trainer={"gradient_clip_val": 0.1}),
    "auto": pair(2, "auto", strategy={"piece_mb": 1.0}, trainer={"max_epochs": 1}),
    "spanning tree": pair(3, "minimum_spanning_tree", trainer={"max_epochs": 1}, seed=5),
    "accumulated": pair(2, "clique", trainer={"accumulate_grad_batches": 2}),
}


def switched(epochs: int, seed: int) -> tuple[Order, Order]:
    options = {"trainer": {"max_epochs": epochs}, "validation": False}
    return order(3, strategy={"topology": "star"}, switches=seed, **options), order(3, strategy="ddp", **options)


DISAGREEING = order(3, strategy={"topology": "ring"}, disagrees=True, trainer={"max_epochs": 1}, validation=False)
KILLED = Order("adaptive_tasks.fit", ranks=3, lost=[1], strategy={"topology": "ring"},
               strike={"rank": 1, "how": "SIGKILL", "batch": 1}, trainer={"max_epochs": 3})  # fmt: skip
RAISING = order(2, strategy={"topology": "star"}, strike={"rank": 1, "how": "memory", "batch": 1})


STAGES = {"replicas": [2, 1], "schedule": "1f1b"}
REPLICAS = Order("fit", ranks=3, split=True, strategy={**STAGES, "topology": "star@1"}, trainer={"max_epochs": 1})
REPLICAS_NATIVE = Order("fit", ranks=3, split=True, strategy=STAGES, trainer={"max_epochs": 1})


TERMINATED = order(3, strategy={"topology": "ring"}, strike={"rank": 1, "how": "SIGTERM", "batch": 1},
                   trainer={"max_epochs": 3})  # fmt: skip


@pytest.mark.parametrize(
    "orders",
    [
        *(pytest.param(orders, id=name) for name, orders in EQUAL.items()),
        *(pytest.param(orders, id=name, marks=pytest.mark.slow) for name, orders in EQUAL_TOO.items()),
    ],
)
def test_training_equals_ddp(farm: Farm, orders: tuple[Order, Order]) -> None:
    ours, theirs = farm.start(orders[0]).outcome, farm.start(orders[1]).outcome
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own["steps"] == other["steps"] > 0
        tolerance = 0.0 if len(ours) == 2 else 1e-6  # DDP multiplies by 1/3 where it is divided by 3 here
        torch.testing.assert_close(own["losses"], other["losses"], atol=tolerance, rtol=tolerance)
        for name, value in other["weights"].items():
            torch.testing.assert_close(own["weights"][name], value, atol=tolerance, rtol=tolerance)
        for name, value in own["weights"].items():
            assert torch.equal(value, ours[0]["weights"][name]) or "running" in name, f"{name} on rank {rank}"
        assert own["metrics"].keys() == other["metrics"].keys()


@pytest.mark.parametrize("orders", [switched(4, 5), pytest.param(switched(26, 11), marks=pytest.mark.slow)])
def test_random_switches_keep_the_ranks_equal_bit_for_bit(farm: Farm, orders: tuple[Order, Order]) -> None:
    ours, theirs = farm.start(orders[0]).outcome, farm.start(orders[1]).outcome
    assert ours[0]["steps"] >= 8
    assert len(set(ours[0]["over"])) >= min(8, ours[0]["steps"] // 2)
    for own in ours:
        assert own["equal"] == [True] * own["steps"]
        assert own["over"] == ours[0]["over"]
        for name, value in theirs[0]["weights"].items():
            assert torch.equal(own["weights"][name], ours[0]["weights"][name])
            torch.testing.assert_close(own["weights"][name], value, atol=1e-5, rtol=1e-5)


def test_replicas_of_a_stage_sum_over_a_topology(farm: Farm) -> None:
    ours, theirs = farm.start(REPLICAS).outcome, farm.start(REPLICAS_NATIVE).outcome
    assert ours[0]["losses"] == theirs[0]["losses"]
    for name, value in theirs[0]["weights"].items():
        assert torch.equal(ours[0]["weights"][name], value), name


def test_ranks_that_want_different_topologies_switch_to_none(farm: Farm) -> None:
    for result in farm.start(DISAGREEING).outcome:
        assert "the ranks disagree on the topology to switch to: rank 0 has 'star (" in result["disagreed"]
        assert ", rank 2 has 'ring (" in result["disagreed"]
        assert result["kept"] == "ring"
        assert result["equal"] == [True] * result["steps"]


def test_a_rank_that_dies_is_named_by_the_others(farm: Farm) -> None:
    for error in farm.start(KILLED).errors:
        assert "PeerError: rank 1 is gone" in error


def test_a_signal_to_one_rank_ends_all_before_the_same_batch(farm: Farm) -> None:
    results = farm.start(TERMINATED).results
    assert all("SIGTERMException" in result["error"] for result in results)
    assert len({result["ended_at"] for result in results}) == 1


def test_a_rank_that_fails_is_quoted_by_the_others(farm: Farm) -> None:
    first, second = farm.start(RAISING).errors
    assert "rank 1 failed: MemoryError: 12 GiB wanted" in first
    assert second == "MemoryError: 12 GiB wanted"


def test_auto_stays_native_unless_another_is_clearly_quicker() -> None:
    found = candidates(["a", "b", "c"])
    seconds = {topology.name: 1.0 for topology in found}
    assert chosen(found, seconds).name == "native"
    assert chosen(found, {**seconds, "ring": 0.97}).name == "native"
    assert chosen(found, {**seconds, "ring": 0.9, "star@1": 0.8}).name == "star@1"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topology": "rings"}, "topology=rings is unknown"),
        ({"topology": [0, 2, 1]}, "has a cycle: 1 -> 2 -> 1"),
        ({"topology": [0, 1, 1]}, r"has 2 roots \(\[0, 1\]\)"),
        ({"topology": [0, 1.7]}, r"topology=\[0, 1.7\] is no array of fathers; give a whole number"),
        ({"topology": [0, "a"]}, "is no array of fathers"),
        ({"topology": 5}, "topology=5 is unknown"),
        ({"topology": None}, "topology=None is unknown"),
        ({"adapt": "false"}, "adapt='false'; give true or false"),
        ({"topolgy": "ring"}, "topolgy='ring' is no option of strategy=adaptive; it has topology, adapt"),
        ({"backend": "mpi"}, "backend=mpi is unknown; choose gloo, nccl or null"),
        ({"piece_mb": 0}, "piece_mb=0 must be more than 0"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook is given, but strategy=adaptive sums gradients itself"),
    ],
)
def test_what_cannot_work_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdaptiveCommStrategy(**settings)


def test_a_topology_for_more_ranks_is_refused_on_one() -> None:
    with pytest.raises(ConfigError, match=r"the father array \[0, 0\] has 2 entries, there are 1 ranks"):
        AdaptiveCommStrategy(topology=[0, 0])._register_ddp_hooks()
    for name in ("auto", "ring", "minimum_spanning_tree"):
        AdaptiveCommStrategy(topology=name)._register_ddp_hooks()


@pytest.mark.parametrize("layer", [torch.nn.Embedding(9, 4, sparse=True), torch.nn.EmbeddingBag(9, 4, sparse=True)])
def test_sparse_gradients_are_refused_before_the_first_step(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = AdaptiveCommStrategy()
    monkeypatch.setattr(AdaptiveCommStrategy, "world_size", 2)
    strategy.model = Mock(spec=DistributedDataParallel, module=torch.nn.Sequential(torch.nn.Embedding(9, 4), layer))
    with pytest.raises(ConfigError, match=r"^1 has sparse=True, .*; make it with sparse=False, or choose strategy=ddp"):
        strategy._register_ddp_hooks()


def test_one_rank_has_no_topology_and_may_be_asked_to_switch() -> None:
    """A script for any number of ranks does so; what it asks for is checked as ever."""
    refused: list[str] = []

    class Switch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for topology in ("ring", "auto", "minimum_spanning_tree", [0], topology_of("ring", ["a"])):
                trainer.strategy.switch_topology(topology)
            for wrong in ("rign", [0, 0], topology_of("ring", ["a", "b"])):
                with pytest.raises(ConfigError) as error:
                    trainer.strategy.switch_topology(wrong)
                refused.append(str(error.value))
            assert trainer.strategy.topology is None

    strategy = AdaptiveCommStrategy()
    with pytest.raises(
        ConfigError, match=r"there is no topology to switch outside of trainer.fit; call it between two"
    ):
        strategy.switch_topology("ring")
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, callbacks=[Switch()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(MeanOf(), samples())
    assert trainer.global_step == 1
    assert [words.split(";")[0][:40] for words in refused] == [
        "topology=rign is unknown",
        "the father array [0, 0] has 2 entries, t",
        "the topology ring is made for 2 ranks, t",
    ]
    with pytest.raises(ConfigError, match=r"there is no topology to switch outside of trainer.fit"):
        strategy.switch_topology("ring")


def test_what_is_not_to_adapt_has_no_policy_that_would() -> None:
    strategy = AdaptiveCommStrategy(adapt=False)
    trainer: Any = SimpleNamespace(callbacks=[InterferencePolicy()])
    with pytest.raises(ConfigError, match=r"strategy.adapt=false, and policy=interference would change the topology"):
        strategy._add_policy(trainer)
    trainer.callbacks = []
    strategy._add_policy(trainer)
    assert trainer.callbacks == []


def test_it_has_a_name_in_lightning() -> None:
    trainer = L.Trainer(strategy="adaptive", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, AdaptiveCommStrategy)


@pytest.mark.parametrize("root", ["cpu", "meta"])
def test_the_strategy_says_where_gradients_lie(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    made = Mock(return_value=Mock(trials={}))
    monkeypatch.setattr("pl_pipe.strategies.adaptive.AdaptableSums", made)
    monkeypatch.setattr("pl_pipe.strategies.adaptive.SumGroups", Mock())
    monkeypatch.setattr("pl_pipe.strategies.adaptive.require_consensus", Mock())
    strategy = AdaptiveCommStrategy("ring", parallel_devices=[torch.device(root)] * 2)
    monkeypatch.setattr(AdaptiveCommStrategy, "world_size", 2)
    monkeypatch.setattr(AdaptiveCommStrategy, "local_rank", 1)
    strategy.model = Mock(spec=DistributedDataParallel, module=torch.nn.Linear(1, 1))
    strategy.model.parameters.return_value = []
    strategy._register_ddp_hooks()
    assert made.call_args.kwargs["device"] == torch.device(root)
