"""How a strategy comes by its plan: measured, cached, split by hand, read from a file, guessed for an evaluation."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric

from pl_pipe.cluster import Cluster
from pl_pipe.errors import ConfigError, PlanError
from pl_pipe.partition import Plan, split_by_hand, write_plan
from pl_pipe.profiling import profile, profile_cache, record_step
from pl_pipe.profiling.profile_cache import ProfileCache, profile_key
from pl_pipe.strategies.pipeline import plan_choice
from pl_pipe.strategies.pipeline.plan_choice import choose_plan, evaluation_plan, plan_digest
from pl_pipe.strategies.pipeline.plan_report import plan_report

CPU = torch.device("cpu")
BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.long))


class Net(L.LightningModule):
    """Three layers that can be placed, with operations between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))
        self.head = nn.Linear(width, 3)
        self.seen = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.body[0](x))
        h = F.relu(self.body[1](h) + h)
        return self.head(h)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.seen.update(self(batch[0]).mean())
        self.log("seen", self.seen)


class Deeper(Net):
    """One layer more, under a name that a Net does not have; and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.extra(x))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were measured."""
    calls = []

    def counted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(model).__name__)
        return profile(model, *args, **{**kwargs, "repeats": 1})

    monkeypatch.setattr(plan_choice, "profile", counted)
    return calls


@pytest.fixture
def choose(tmp_path: Path) -> Callable[..., Plan]:
    def call(model: nn.Module | None = None, batch: Any = BATCH, **settings: Any) -> Plan:
        return choose_plan(model or Net(), batch, **{"device": CPU, "cache_folder": tmp_path / "cache", **settings})

    return call


def modules(plan: Plan) -> list[tuple[str, ...]]:
    return [stage.modules for stage in plan.stages]


# ---- measured and cached


def test_a_plan_is_measured_once_and_then_found(
    choose: Callable[..., Plan], measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pl_pipe.strategies"):
        first, second = choose(devices=2, plan="straight"), choose(devices=2, plan="straight")
    assert measured == ["Net"]
    assert first == second
    assert first.shape == "1-1"
    assert first.single_device_step_s > 0
    (kept,) = (tmp_path / "cache").iterdir()
    was_measured, was_found = (record.getMessage() for record in caplog.records)
    assert was_measured.startswith("the profile of Net was measured on cpu (")
    assert was_found == f"the profile of Net was found: {kept}"
    choose(devices=3)  # the profile is the same for any number of stages
    assert measured == ["Net"]


def test_one_stage_is_not_measured(choose: Callable[..., Plan], measured: list[str]) -> None:
    assert modules(choose(devices=1)) == [("body.0", "body.1", "head")]
    assert measured == []


def test_the_model_is_left_as_it_was(choose: Callable[..., Plan], measured: list[str]) -> None:
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    choose(model, devices=2)
    evaluation_plan(model, BATCH, lambda model, batch: model.validation_step(batch, 0), devices=2, device=CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert float(model.seen.weight) == 0
    assert torch.equal(torch.get_rng_state(), random_state)


def frozen(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    return model


def tied(model: Net) -> nn.Module:
    model.body[1] = model.body[0]
    return model


def rated(model: Net) -> nn.Module:
    model.depth = 3
    return model


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"model": Net(width=9)}, id="shapes"),
        pytest.param({"model": Net().double()}, id="parameter types"),
        pytest.param({"model": frozen(Net())}, id="frozen"),
        pytest.param({"model": tied(Net())}, id="tied"),
        pytest.param({"model": rated(Net())}, id="a setting"),
        pytest.param({"model": Deeper()}, id="class"),
        pytest.param({"batch": (torch.ones(5, 8), BATCH[1])}, id="batch shape"),
        pytest.param({"batch": (BATCH[0].double(), BATCH[1])}, id="batch type"),
        pytest.param({"batch": list(BATCH)}, id="batch structure"),
        pytest.param({"autocast_dtype": torch.bfloat16}, id="autocast"),
    ],
)
def test_the_key_changes_with(other: dict[str, Any]) -> None:
    plain = {"model": Net(), "batch": BATCH, "device": CPU, "autocast_dtype": None}
    assert profile_key(**{**plain, **other}) != profile_key(**plain)
    assert profile_key(**{**plain, "model": Net(), "batch": (torch.rand(4, 8), BATCH[1] + 1)}) == profile_key(**plain)


def test_the_key_changes_with_the_training_step_and_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return profile_key(Net(), BATCH, device=CPU, autocast_dtype=None)

    keys = [key()]
    with monkeypatch.context() as patched:
        patched.setattr(Net, "training_step", lambda self, batch, batch_idx: self(batch[0]).sum())
        keys.append(key())
    with monkeypatch.context() as patched:
        patched.setattr(profile_cache, "__version__", "0.0.0")
        keys.append(key())
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(key())
    assert len(set(keys)) == 4
    assert key() == keys[0]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Other tests may have turned on what is said besides."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1}', "[]", "\0\xff"])
def test_a_damaged_file_is_measured_anew(
    choose: Callable[..., Plan], measured: list[str], tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    choose(devices=2)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(content)
    choose(devices=2)
    assert measured == ["Net", "Net"]
    assert len(warnings_in(caplog)) == 1
    assert "measured anew" in caplog.text
    choose(devices=2)  # it was mended
    assert measured == ["Net", "Net"]


def test_a_folder_that_cannot_be_written_is_one_warning(
    choose: Callable[..., Plan], measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    plan = choose(devices=2, cache_folder=tmp_path / "file" / "cache")
    assert plan.ranks == 2
    (warning,) = warnings_in(caplog)
    assert "set PL_PIPE_CACHE to a folder that can be written" in warning.getMessage()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(found: Any, path: Path) -> None:
        path.write_text("half of")
        raise OSError("no space left on device")

    found = profile(Net(), BATCH, repeats=1, warmup=0)
    cache = ProfileCache(tmp_path)
    cache.store("key", found)
    monkeypatch.setattr(profile_cache, "write_profile", full)
    cache.store("key", found)
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]
    assert cache.find("key") == found


def test_the_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "mine"))
    assert profile_cache.default_folder() == tmp_path / "mine"
    monkeypatch.delenv("PL_PIPE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert profile_cache.default_folder() == tmp_path / ".cache" / "pl_pipe" / "profiles"


def test_a_slow_step_is_not_repeated() -> None:
    assert profile(Net(), BATCH, repeats=50, warmup=1, budget_s=0.0).repeats == 1
    assert profile(Net(), BATCH, repeats=3, warmup=0, budget_s=600.0).repeats == 3


def test_more_stages_than_layers(
    choose: Callable[..., Plan], measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert len(choose(devices=5, plan="straight").stages) == 3
    assert "5 devices, but Net can be divided into 3 at most" in caplog.text
    assert "set devices=3" in caplog.text
    caplog.clear()
    assert len(choose(devices=3, plan="straight").stages) == 3
    assert not warnings_in(caplog)


# ---- by hand


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        (["body.0"], [("body.0",), ("body.1", "head")]),
        (["body"], [("body.0", "body.1"), ("head",)]),
        (["body.0", "body.1"], [("body.0",), ("body.1",), ("head",)]),
    ],
)
def test_split_points(
    choose: Callable[..., Plan], measured: list[str], points: list[str], wanted: list[tuple[str, ...]]
) -> None:
    plan = choose(devices=len(wanted), split_points=points)
    assert modules(plan) == wanted
    assert measured == []
    assert plan.predicted_step_s == 0
    assert [stage.ranks for stage in plan.stages] == [(rank,) for rank in reversed(range(len(wanted)))]


def test_split_points_take_the_times_of_a_cached_profile(choose: Callable[..., Plan], measured: list[str]) -> None:
    choose(devices=2)
    assert choose(devices=2, split_points=["body.0"]).predicted_step_s > 0


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (["body.0", "body.1"], ConfigError, r"makes 3 stages, the trainer has 2 devices; set devices=3, or name 1 mod"),
        ([], ConfigError, r"split_points=\[\] makes 1 stages, the trainer has 2 devices; set devices=1, or name 1"),
        (
            ["tail"],
            PlanError,
            r"split_points names tail, which is no layer or module that the step runs; .* it has: body.0",
        ),
        (
            ["head"],
            PlanError,
            r"split_points=\['head'\] leaves no module for stage 1: what runs after head has no module of its own",
        ),
    ],
)
def test_wrong_split_points(
    choose: Callable[..., Plan], points: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose(devices=2, split_points=points)


def test_split_points_beside_a_plan(choose: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"plan=p.json and split_points=\['body'\] each say where to cut; leave one"):
        choose(devices=2, plan="p.json", split_points=["body"])


# ---- from a file


def written(plan: Plan, folder: Path) -> str:
    write_plan(plan, folder / "plan.json")
    return str(folder / "plan.json")


def by_hand(*split_after: str, workers: int = 2, **settings: Any) -> Plan:
    graph = record_step(Net(), BATCH).graph
    return split_by_hand(graph, cluster=Cluster.flat(workers, 1e9), split_after=split_after, **settings)


def test_a_plan_is_read(choose: Callable[..., Plan], measured: list[str], tmp_path: Path) -> None:
    plan = by_hand("body.0")
    assert choose(devices=2, plan=written(plan, tmp_path)) == plan
    assert measured == []


@pytest.mark.parametrize(
    ("plan", "model", "message"),
    [
        pytest.param(
            lambda: by_hand("body.0", workers=3, replicas=[2, 1]), Net,
            r"plan.json \(2-1\) is for 3 devices, the trainer has 2; set devices=3, or make one", id="replicas",
        ),
        pytest.param(
            lambda: by_hand("body.0", "body.1", workers=3), Net,
            r"\(1-1-1\) is for 3 devices, the trainer has 2; set devices=3, or make .*devices=2", id="stages",
        ),
        pytest.param(
            lambda: replace(
                plan := by_hand("body.0", workers=4), stages=(replace(plan.stages[0], ranks=(3,)), plan.stages[1])
            ), Net, r"uses rank 3, the trainer has ranks 0 to 1", id="ranks",
        ),
        pytest.param(
            lambda: replace(plan := by_hand("body"), stages=(plan.stages[0], replace(plan.stages[1], modules=()))), Net,
            r"stage 1 of plan=.* names no module, so nothing of Net is in it", id="no modules",
        ),
        pytest.param(
            lambda: by_hand("body.0"), lambda: nn.Sequential(nn.Linear(8, 8)),
            r"is for another model: Sequential has no body.0, body.1, head; make one with", id="unknown modules",
        ),
        pytest.param(
            lambda: by_hand("body.0"), Deeper,
            r"is for another model: it has no stage for extra of Deeper, which the step runs", id="modules left out",
        ),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_used(
    choose: Callable[..., Plan], tmp_path: Path, plan: Callable[[], Plan], model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        choose(model(), devices=2, plan=written(plan(), tmp_path))


def test_modules_that_no_step_runs_need_no_place(choose: Callable[..., Plan], tmp_path: Path) -> None:
    model = Net()
    model.spare = nn.Linear(2, 2)
    assert modules(choose(model, devices=2, plan=written(by_hand("body"), tmp_path)))[1] == ("head",)


def test_a_file_that_is_not_there(choose: Callable[..., Plan], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.json cannot be read: .* make it with pl-pipe plan"):
        choose(devices=2, plan=str(tmp_path / "none.json"))


# ---- evaluation


def validation(model: nn.Module, batch: Any) -> Any:
    assert not torch.is_grad_enabled()
    assert not model.training
    return model.validation_step(batch, 0)


def test_a_plan_for_evaluation() -> None:
    plan = evaluation_plan(Net(), BATCH, validation, devices=3, device=CPU, ignore=(Metric,))
    assert modules(plan) == [("body.0",), ("body.1",), ("head",)]  # the metric is no layer
    assert (plan.predicted_step_s, plan.single_device_step_s) == (0.0, 0.0)
    assert len(evaluation_plan(Net(), BATCH, validation, devices=4, device=CPU, ignore=(Metric,)).stages) == 3


def test_evaluation_balances_what_it_can_see() -> None:
    """Of four layers the last is as large as the others together."""
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)), nn.Linear(10, 30))
    plan = evaluation_plan(model, torch.ones(1, 10), lambda model, batch: model(batch), devices=2, device=CPU)
    assert modules(plan) == [("0", "1", "2"), ("3",)]


# ---- digest and report


def test_digests_are_equal_where_plans_run_alike() -> None:
    plan = by_hand("body.0")
    slower = replace(plan, predicted_step_s=7.0, stages=tuple(replace(s, forward_s=3.0) for s in plan.stages))
    assert plan_digest(slower) == plan_digest(plan) == plan_digest(by_hand("body.0"))
    first, second = plan.stages
    others = [
        by_hand("body"),
        by_hand("body.0", "body", workers=3),
        replace(plan, stages=(replace(first, ranks=second.ranks), replace(second, ranks=first.ranks))),
        replace(plan, transfers=()),
    ]
    assert len({plan_digest(other) for other in (plan, *others)}) == 5
    assert plan_digest(Plan.from_json(json.loads(json.dumps(plan.as_json())), source="")) == plan_digest(plan)


def test_a_report() -> None:
    assert plan_report(by_hand("body.0")) == (
        "a pipeline of 2 stages\n"
        "stage  replicas  ranks  modules            compute  weights  sends  memory\n"
        "    0         1      1  body.0                   -    288 B  128 B  2.0 kB\n"
        "    1         1      0  body.1 … head (2)        -    396 B    0 B  1.9 kB"
    )
    graph = record_step(Net(), BATCH).graph
    timed = replace(graph, nodes=tuple(replace(node, forward_s=1e-3) for node in graph.nodes))
    plan = split_by_hand(timed, cluster=Cluster.flat(2, 1e9), split_after=["body.0"])
    headline, _, first, _ = plan_report(plan).splitlines()
    assert headline == "a pipeline of 2 stages, 5 ms a mini-batch predicted, one device takes 7 ms"
    assert "2 ms" in first  # the layer and its relu
    assert ", 6 ms a mini-batch predicted" in plan_report(plan, simulated_s=6e-3)


def test_a_report_of_replicas() -> None:
    headline, shared, _, first, last = plan_report(by_hand("body.0", workers=4, replicas=[3, 1])).splitlines()
    assert headline == "a pipeline of 2 stages with replicas, 3-1"
    assert shared == "3-1: a round of 3 batches shares an update"
    assert first.split()[:4] == ["0", "3", "1-3", "body.0"]
    assert last.split()[:4] == ["1", "1", "0", "body.1"]
    assert "round" not in plan_report(by_hand("body.0", workers=4, replicas=[3, 1]), rounds=False)


def test_a_report_of_one_stage() -> None:
    everywhere, shared, *_ = plan_report(by_hand(workers=2, replicas=[2])).splitlines()
    assert everywhere == "data parallel: the whole model on each of 2 ranks"
    assert shared == "2: a round of 2 batches shares an update"
    assert plan_report(by_hand()).splitlines()[0] == "the whole model on one rank"
