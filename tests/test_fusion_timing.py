"""The quickest formulation of each layer is found by running them, once for a shape and device."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from pl_pipe.errors import ConfigError
from pl_pipe.fusion import Site, Timed, VariantArray
from pl_pipe.fusion.context import _tried
from pl_pipe.fusion.formulations import BRANCHES, GROUPED, SHARED_INPUT, Formulation
from pl_pipe.fusion.replay.operations import Operations
from pl_pipe.fusion.rules.linear import Linear
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import array_steps
from tests.fused_modules import Classifier, difference, loader, trainer
from tests.fusion_cases import assert_equal_to_separate, built, common
from tests.test_fusion_replay import Recorded

SITE = Site(
    layer="stem", operation="conv2d", shapes=((4, 2, 3, 8, 8), (4, 5, 3, 3, 3)), settings=([1, 1],),
    dtype="torch.float32", device="cpu", variants=4, trains=True,
)  # fmt: skip
Ways = dict[str, Callable[[], None]]


class Counted:
    """Ways that take so many milliseconds, and how often each was run."""

    def __init__(self, **milliseconds: float) -> None:
        self.runs = dict.fromkeys(milliseconds, 0)
        self.ways: Ways = {name: lambda name=name: self._run(name, milliseconds[name]) for name in milliseconds}  # type: ignore[misc]

    def _run(self, name: str, milliseconds: float) -> None:
        self.runs[name] += 1
        if milliseconds < 0:
            raise RuntimeError("no such kernel")
        time.sleep(milliseconds / 1e3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "layers"


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.iterdir()]


def test_the_quickest_is_chosen_and_known_to_the_next_run(folder: Path) -> None:
    counted = Counted(grouped=20, branches=1, other=10)
    timed = Timed(folder)
    assert timed.choose(SITE, counted.ways) == "branches"
    assert timed.reason(SITE).startswith("branches 1")
    before = dict(counted.runs)
    assert timed.choose(replace(SITE, layer="elsewhere"), counted.ways) == "branches"
    again = Timed(folder)
    assert again.choose(SITE, counted.ways) == "branches"
    assert counted.runs == before, "what is known was timed again"


@pytest.mark.parametrize(
    "other",
    [
        {"shapes": ((4, 2, 3, 9, 9), (4, 5, 3, 3, 3))}, {"settings": ([2, 2],)}, {"strides": ((1,),)},
        {"dtype": "torch.float32 as torch.bfloat16"}, {"variants": 5}, {"trains": False}, {"operation": "conv1d"},
    ],
)  # fmt: skip
def test_what_a_time_may_depend_on_is_timed_by_itself(folder: Path, other: dict[str, Any]) -> None:
    timed = Timed(folder)
    timed.choose(SITE, Counted(grouped=1, branches=20).ways)
    assert timed.choose(replace(SITE, **other), Counted(grouped=20, branches=1).ways) == "branches"


def test_a_way_that_fails_is_not_chosen(folder: Path) -> None:
    timed = Timed(folder)
    assert timed.choose(SITE, Counted(grouped=-1, branches=1).ways) == "branches"
    assert "grouped fails" in timed.reason(SITE)
    assert Timed(folder).choose(SITE, Counted(grouped=1, branches=9).ways) == "grouped", "it may not fail again"
    usual = replace(SITE, shapes=((4, 8, 3, 8, 8), (4, 5, 3, 3, 3)))
    assert timed.choose(usual, {GROUPED: Counted(x=-1).ways["x"], BRANCHES: Counted(x=-1).ways["x"]}) == BRANCHES


@pytest.mark.parametrize(
    "content",
    [
        "{", "[1]", '{"a": 3}', "[" * 100_000, '{"seconds": {"grouped": "soon", "branches": 1}}',
        '{"seconds": {"grouped": -1, "branches": 1}}', '{"seconds": {"grouped": NaN, "branches": 1}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(folder: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    Timed(folder).choose(SITE, Counted(grouped=1, branches=9).ways)
    [file] = folder.iterdir()
    file.write_text(content)
    with caplog.at_level(logging.WARNING, "pl_pipe"):
        assert Timed(folder).choose(SITE, Counted(grouped=9, branches=1).ways) == "branches"
    assert "are measured anew" in caplog.text
    assert [set(one["seconds"]) for one in kept(folder)] == [{"grouped", "branches"}]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    counted = Counted(grouped=1, branches=9)
    with caplog.at_level(logging.WARNING, "pl_pipe"):
        timed = Timed(tmp_path / "file" / "layers")
        assert timed.choose(SITE, counted.ways) == "grouped"
    assert "set PL_PIPE_CACHE" in caplog.text
    before = dict(counted.runs)
    timed.choose(replace(SITE, layer="elsewhere"), counted.ways)
    assert counted.runs == before


class Network(nn.Module):
    """A layer of every kind that there is a choice for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.deep = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.deep(self.stem(x)).mean((2, 3)))
        return out


@pytest.mark.parametrize("quickest", [GROUPED, BRANCHES])
def test_whatever_is_chosen_gives_the_same_numbers(
    folder: Path, quickest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing leaves gradients and buffers alone; evaluations are timed by themselves."""
    monkeypatch.setattr("pl_pipe.fusion.timing._seconds", ran_for(quickest))
    variants = built(Network)
    batches = common(5, 3, 8, 8), common(2, 3, 8, 8)
    array = assert_equal_to_separate(variants, *batches, chooser=Timed(folder))
    assert array.report.how("deep.2") == quickest
    with torch.no_grad():
        array(batches[0])
    trains = [one["site"]["trains"] for one in kept(folder)]
    assert True in trains
    assert False in trains


def ran_for(quickest: str) -> Callable[..., float]:
    """Runs a way, and says that `quickest` was."""

    def seconds(way: Any, device: torch.device) -> float:
        way()
        return 1.0 if way.args[0].name == quickest else 2.0

    return seconds


@pytest.mark.parametrize("formulation", ["array", "captured array", "model array"])
def test_trainings_with_timed_layers_equal_separate_runs(
    formulation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step is recorded, which must not hear of what was only timed."""
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path))
    variants: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.03, "weight_decay": 0.05}]
    kind: type[Classifier] = Recorded
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation, layers="timed")
    trainer(strategy=fused).fit(kind("resnet"), loader("resnet"), loader("resnet", shuffle=False))
    assert kept(tmp_path / "layers"), "nothing was timed"
    facts = fused.fusion_facts
    assert facts is not None
    assert any(SHARED_INPUT in line and GROUPED in line for line in facts.lines), "the report does not say why"
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone = kind("resnet", **variant)
        trainer().fit(alone, loader("resnet"), loader("resnet", shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number


def test_layers_are_timed_on_a_gpu_unless_runs_are_to_be_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert array_steps._are_timed("auto", gpu)
    assert not array_steps._are_timed("auto", cpu)
    assert array_steps._are_timed("timed", cpu)
    assert not array_steps._are_timed("usual", gpu)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert not array_steps._are_timed("auto", gpu)
    with pytest.raises(ConfigError, match="choose timed, usual or auto"):
        FusionStrategy([{"lr": 0.1}], layers="fast")


def test_an_array_takes_a_chooser_of_timed_layers(folder: Path) -> None:
    array = VariantArray(built(Network), chooser=Timed(folder))
    array(common(4, 3, 8, 8))
    assert "grouped" in array.report.entries[0].why


def test_neither_recordings_nor_hooks_hear_of_what_is_only_timed() -> None:
    weight, x = torch.ones(2, 4, 3, requires_grad=True), torch.ones(2, 5, 3)
    heard: list[torch.Tensor] = []
    weight.register_hook(heard.append)
    ran: list[torch.Tensor] = []

    def compute(call: Linear) -> torch.Tensor:
        ran.append(call.x @ call.weight.mT)
        return ran[-1]

    with Operations([weight]) as noted:
        _tried(Formulation("product", compute), Linear(x, weight, None, 2))
    assert [one.requires_grad for one in ran] == [True]
    assert noted.found == []
    assert heard == []
    assert weight.grad is None
