"""The small parts of the pipeline strategy: micro-batches, options, schedulers' settings, swaps, names."""

import subprocess
import sys
from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import ConfigError, StageError
from pl_pipe.runtime.loader_generators import generators_kept
from pl_pipe.runtime.micro_batches import batch_size, combined, split
from pl_pipe.runtime.mini_batch import Update
from pl_pipe.stages.habits import _without_texts
from pl_pipe.stages.parameter_swap import ParameterSwap
from pl_pipe.strategies import PipeDreamStrategy
from pl_pipe.strategies.pipeline.scheduled_settings import settings_of, with_settings
from pl_pipe.strategies.pipeline.settings import PipelineSettings, split_points_of
from pl_pipe.strategies.pipeline.step_log import _one_for_all
from pl_pipe.strategies.pipeline.support import check_callbacks
from pl_pipe.tensors.ghosts.specs import scan
from tests.conftest import TIMEOUT_S
from tests.test_schedule import plan_of

# --- Micro-batches --------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


def test_all_forms_of_a_batch_are_divided_alike() -> None:
    x, y = torch.arange(7), torch.arange(14).view(7, 2)
    batch = {
        "pair": Pair(x, y),
        "names": list("abcdefg"),
        "rate": 0.5,
        "scale": torch.tensor(2.0),
    }
    parts = split(batch, 3)
    assert [len(part.content["pair"].x) for part in parts] == [3, 2, 2]
    assert [part.share for part in parts] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert torch.equal(torch.cat([part.content["pair"].y for part in parts]), y)
    assert "".join("".join(part.content["names"]) for part in parts) == "abcdefg"
    for part in parts:
        assert isinstance(part.content["pair"], Pair)
        assert part.content["rate"] == 0.5
        assert part.content["scale"] == 2.0


def test_what_has_one_entry_a_sample_is_divided_whatever_holds_it() -> None:
    """Texts of `zip(*batch)`, arrays, and dictionaries of any kind."""
    more = defaultdict(list, texts=("a", "b", "c", "d"), shape=(224, 224, 3))
    batch = (torch.arange(4), more, np.arange(8).reshape(4, 2), np.ones(3))
    parts = [part.content for part in split(batch, 2)]
    assert [part[1]["texts"] for part in parts] == [("a", "b"), ("c", "d")]
    assert [part[2].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for part in parts:
        assert isinstance(part[1], defaultdict)
        assert part[1]["shape"] == (224, 224, 3)
        assert part[3].tolist() == [1, 1, 1]
    assert more["texts"] == ("a", "b", "c", "d"), "the batch itself stays as it was"


class Kept(MutableMapping[str, Any]):
    """Holds what it is given in an attribute, which a copy would share."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        del self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@pytest.mark.parametrize("kind", [Kept, MappingProxyType, UserDict])
def test_a_mapping_is_divided_into_others_of_its_kind(kind: Any) -> None:
    batch = kind({"x": torch.arange(4)})
    parts = [part.content for part in split(batch, 2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(type(part) is kind for part in parts)
    assert batch["x"].tolist() == [0, 1, 2, 3]


def test_a_size_is_not_divided_where_it_has_as_many_numbers_as_the_batch_has_samples() -> None:
    parts = split((torch.arange(2), (480, 640), ["a", "b"]), 2)
    assert [part.content[1:] for part in parts] == [((480, 640), ["a"]), ((480, 640), ["b"])]


def test_fewer_samples_than_parts_make_fewer_parts() -> None:
    assert [part.content.tolist() for part in split(torch.arange(2), 4)] == [[0], [1]]
    assert [len(part.content) for part in split(torch.arange(7), 4, least=2)] == [3, 2, 2]
    assert [len(part.content) for part in split(torch.arange(3), 2, least=2)] == [3]
    (whole,) = split(torch.arange(1), 4)
    assert whole.share == 1.0


def test_one_part_is_the_batch_itself() -> None:
    batch: dict[str, Any] = {"anything": object()}
    assert split(batch, 1)[0].content is batch
    assert batch_size(batch) is None


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"first dimensions \[3, 8\], so it is not clear which"):
        split({"weights": torch.ones(3), "x": torch.ones(8, 2)}, 2)
    with pytest.raises(ConfigError, match=r"num_microbatches=2, but the batch \(dict\) holds no tensor"):
        split({"text": "a"}, 2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])

    class Holder:
        def __init__(self) -> None:
            self.x = torch.ones(4, 2)

    with pytest.raises(ConfigError, match="Holder, which cannot be divided"):
        split([torch.ones(4), Holder()], 2)
    assert split(packed, 1)[0].content is packed


def test_outputs_are_put_together() -> None:
    shares = [0.75, 0.25]
    found = combined(
        [
            {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 2), "note": "a", "norm": 2.0},
            {"loss": torch.tensor(3.0), "logits": torch.ones(1, 2), "note": "b", "norm": 4.0},
        ],
        shares,
    )
    assert found["loss"] == 1.5
    assert found["norm"] == 2.5
    assert found["logits"].shape == (4, 2)
    assert found["note"] == ["a", "b"]


# --- Options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zero_bubble"}, "schedule=zero_bubble is unknown; choose one of pipedream"),
        ({"num_microbatches": 0, "schedule": "1f1b"}, "num_microbatches=0"),
        ({"num_microbatches": 4}, "schedule=pipedream lets whole batches enter"),
        ({"vertical_sync": True, "schedule": "gpipe"}, "vertical_sync=true, but schedule=gpipe"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelineSettings(**options)


def test_split_points_are_a_list() -> None:
    assert split_points_of(["a", "b"]) == ("a", "b")
    with pytest.raises(ConfigError, match=r"split_points='features' is one text"):
        split_points_of("features")


def test_2bw_needs_as_many_micro_batches_as_are_in_flight() -> None:
    plan = plan_of((1, 1, 1, 1))
    with pytest.raises(ConfigError, match=r"num_microbatches=2, but .* keeps 3 in flight.*set num_microbatches=3"):
        PipelineSettings(schedule="pipedream_2bw", num_microbatches=2).for_rank(plan, 0)
    assert PipelineSettings(schedule="pipedream_2bw", num_microbatches=3).for_rank(plan, 3).versioned
    assert PipelineSettings(schedule="1f1b", num_microbatches=2).for_rank(plan, 0).update_every == 2


@pytest.mark.parametrize(
    ("schedule", "versioned"),
    [("pipedream", [True, True, False]), ("pipedream_2bw", [True] * 3), ("1f1b", [False] * 3), ("gpipe", [False] * 3)],
)
def test_only_late_stages_keep_versions(schedule: str, versioned: list[bool]) -> None:
    settings = PipelineSettings(schedule=schedule)
    parts = [settings.for_rank(plan_of((1, 1, 1)), stage) for stage in range(3)]
    assert [part.versioned for part in parts] == versioned
    assert [part.warmup for part in parts] == [2, 1, 0]
    assert not settings.for_rank(None, 0).versioned
    assert settings.for_rank(plan_of((1, 1, 1)), -1).warmup == 0  # a rank without a stage


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedul='1f1b' is no option of PipeDreamStrategy; it has plan, schedule"):
        PipeDreamStrategy(schedul="1f1b")
    with pytest.raises(ConfigError, match=r"num_microbatches=2\.5"):
        PipeDreamStrategy(schedule="1f1b", num_microbatches=2.5)  # type: ignore[arg-type]


# --- Updates and settings -------------------------------------------------------------------------------------------


def test_an_optimizer_has_other_settings_for_a_while() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": torch.tensor(0.5)}], lr=0.1, momentum=0.9)
    kept = settings_of(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)  # a scheduler that changes the tensor itself
    optimizer.param_groups[0]["nesterov"] = True
    with with_settings(optimizer, kept):
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.param_groups[0]["steps"] = 3  # an optimizer's own counter
        optimizer.param_groups[0]["momentum"] = 0.5  # a hook's choice
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert optimizer.param_groups[0]["nesterov"] is True
    assert optimizer.param_groups[0]["steps"] == 3


def test_updates_add_up() -> None:
    both = Update({"b": torch.ones(1)}, "second").added_to({"a": torch.ones(1), "b": torch.ones(1)})
    assert {name: gradient.item() for name, gradient in both.gradients.items()} == {"a": 1.0, "b": 2.0}
    assert both.settings == "second"


def test_callbacks_that_a_pipeline_cannot_serve_are_refused() -> None:
    for callback in (StochasticWeightAveraging(0.1), EMAWeightAveraging()):
        with pytest.raises(ConfigError, match=r"averages the weights after a batch.*set schedule=1f1b"):
            check_callbacks([callback], schedule="pipedream")
        check_callbacks([callback], schedule="1f1b", module=L.LightningModule())
    normed = L.LightningModule()
    normed.norm = torch.nn.BatchNorm1d(2)
    with pytest.raises(ConfigError, match="a last epoch without a backward"):
        check_callbacks([StochasticWeightAveraging(0.1)], schedule="1f1b", module=normed)
    with pytest.raises(ConfigError, match=r"train_time_interval=0:00:01.*set every_n_train_steps"):
        check_callbacks([ModelCheckpoint(train_time_interval=timedelta(seconds=1))], schedule="1f1b")
    check_callbacks([ModelCheckpoint(every_n_train_steps=2)], schedule="pipedream")


@pytest.mark.parametrize(
    ("reduce_fx", "wanted"),
    [("mean", 1.5), ("sum", 4.0), (torch.sum, 4.0), (torch.max, 3.0), (torch.mean, 1.5), ("min", 1.0)],
)
def test_a_log_of_micro_batches_is_that_of_the_batch(reduce_fx: Any, wanted: float) -> None:
    calls = [
        (0.75, {"name": "x", "value": torch.tensor(1.0), "reduce_fx": reduce_fx, "batch_size": 3}),
        (0.25, {"name": "x", "value": torch.tensor(3.0), "reduce_fx": reduce_fx, "batch_size": 1}),
    ]
    found = _one_for_all(calls)
    assert found["value"] == wanted
    assert found["batch_size"] == 4


def test_planning_leaves_a_loaders_generator_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.arange(8)), shuffle=True, generator=generator)
    before = generator.get_state()
    with generators_kept([loader]):
        next(iter(loader))
        assert not torch.equal(generator.get_state(), before)
    assert torch.equal(generator.get_state(), before)


def test_signatures_forget_texts_but_not_what_decides() -> None:
    def signature(batch: Any) -> Any:
        return _without_texts(scan(batch, []))

    assert signature({"x": torch.ones(2), "id": "a", "w": 0.5}) == signature({"x": torch.ones(2), "id": "b", "w": 0.7})
    assert signature([torch.ones(2), 3, None]) is not None
    assert signature([torch.ones(2), 3]) != signature([torch.ones(2), 4])
    assert signature([torch.ones(2), object()]) is None


# --- Swaps ----------------------------------------------------------------------------------------------------------


def test_a_swap_reaches_tied_and_recurrent_weights_and_ends() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "lstm": nn.LSTM(2, 2)})
    model["b"].weight = model["a"].weight
    before = dict(model.named_parameters())
    swap = ParameterSwap(model)
    others = {name: torch.zeros_like(parameter) for name, parameter in before.items()}
    with swap.using(others):
        assert model["a"].weight is model["b"].weight is others["a.weight"]
        assert model["lstm"]._flat_weights[0] is others["lstm.weight_ih_l0"]
        assert not model["lstm"](torch.ones(1, 2))[0].any()
    assert dict(model.named_parameters()) == before
    assert model["lstm"]._flat_weights[0] is model["lstm"].weight_ih_l0
    assert isinstance(model["a"].weight, nn.Parameter)


def test_a_swap_of_nothing_known_is_refused_and_undone() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with (
        pytest.raises(StageError, match="a version of gone is given"),
        ParameterSwap(model).using({"weight": torch.zeros(2, 2), "gone": torch.zeros(1)}),
    ):
        pass
    assert model.weight is weight


# --- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["import pl_pipe, lightning", "import lightning, pl_pipe"])
def test_the_strategy_is_registered_in_either_order(order: str) -> None:
    code = (
        f"{order}; import lightning.pytorch.strategies as s; trainer = lightning.Trainer("
        "strategy='pipedream', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False, "
        "enable_progress_bar=False); print(type(trainer.strategy).__name__); import pl_pipe.registration as r; "
        "r.register_strategies(); assert 'pipedream' in s.StrategyRegistry.available_strategies()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "PipeDreamStrategy" in done.stdout
