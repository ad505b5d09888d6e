"""Which stage owns what: homes of tied weights, pure modules, placement and its undoing, plans for other models."""

import copy

import pytest
import torch
from torch import nn

from pl_pipe.cluster import Cluster
from pl_pipe.errors import StageError
from pl_pipe.partition import Plan, Stage
from pl_pipe.stages import Ownership, place, restore


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.one = Block()
        self.two = Block()
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.two(self.one(self.embedding(x))))


OWNERS = {"embedding": 0, "one.first": 0, "one.norm": 0, "two.first": 1, "two.norm": 2, "out": 2}


def test_homes_follow_the_modules_and_tied_weights_live_at_their_first_user() -> None:
    homes = Ownership.from_mapping(Net(), OWNERS).homes
    assert homes["embedding.weight"] == homes["out.weight"] == 0
    assert homes["one.scale"] == 0
    assert homes["two.scale"] == 1, "a container's own parameter lives with the first of its leaves"
    assert homes["two.norm.running_mean"] == 2
    assert homes["unused.weight"] == 0


def test_places_name_the_largest_modules_of_one_stage() -> None:
    model = Net()
    places = Ownership.from_mapping(model, OWNERS).places(model, stage=1)
    assert places[model.one].owner == 0
    assert places[model.one].whole
    assert not places[model.one].is_mine
    assert places[model.two].owner is None, "a cut goes through it"
    assert places[model.two].is_mine
    assert places[model.out].owner == 2
    assert not places[model.out].whole, "its weight lives on another stage"


def test_placement_keeps_the_order_of_parameters_and_no_foreign_memory() -> None:
    model = Net()
    model.embedding.weight.optimizer_group = "slow"  # type: ignore[attr-defined]
    names = [name for name, _ in model.named_parameters()]
    place(model, Ownership.from_mapping(model, OWNERS), stage=1)
    assert [name for name, _ in model.named_parameters()] == names
    assert {name for name, tensor in model.named_parameters() if not tensor.is_meta} == {
        *("two.first.weight", "two.first.bias", "two.scale")
    }
    assert model.out.weight is model.embedding.weight
    assert model.embedding.weight.optimizer_group == "slow"  # type: ignore[attr-defined]
    assert isinstance(model.embedding.weight, nn.Parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == len(names)


def test_restoring_makes_an_ordinary_model() -> None:
    whole = Net()
    model = copy.deepcopy(whole)
    place(model, Ownership.from_mapping(model, OWNERS), stage=1)
    restore(model, whole.state_dict())
    tokens = torch.randint(0, 9, (5,))
    assert torch.equal(model(tokens), whole(tokens))
    assert model.out.weight is model.embedding.weight


def test_restoring_needs_every_value() -> None:
    model = Net()
    place(model, Ownership.from_mapping(model, OWNERS), stage=1)
    with pytest.raises(StageError, match=r"no value for embedding\.weight"):
        restore(model, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other.layer": 1}, "no other.layer"),
        ({"two.norm": 4, "out": 4}, "stage 2 of 5 owns no module"),
        ({"one": 0}, "one.first is planned apart"),
    ],
)
def test_plans_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(StageError, match=message):
        Ownership.from_mapping(Net(), OWNERS | change)


def plan(*ranks: tuple[int, ...]) -> Plan:
    modules = [[name for name, stage in OWNERS.items() if stage == index] for index in range(3)]
    stages = tuple(
        Stage(tuple(names), tuple(names), on, 1.0, 1.0, 0, 0) for names, on in zip(modules, ranks, strict=True)
    )
    return Plan(stages, (), Cluster.flat(4, 1e9), "none", 1.0, 1.0, None, 1.0)


def test_a_plan_names_the_owners() -> None:
    found = Ownership.from_plan(Net(), plan((0,), (1,), (2,)))
    assert found == Ownership.from_mapping(Net(), OWNERS)


def test_replicas_of_a_stage_own_the_same() -> None:
    assert Ownership.from_plan(Net(), plan((0,), (1, 2), (3,))) == Ownership.from_plan(Net(), plan((0,), (1,), (2,)))


def test_ignored_modules_belong_to_nobody() -> None:
    model = Net()
    ownership = Ownership.from_mapping(model, OWNERS, ignore=[nn.BatchNorm1d])
    place(model, ownership, stage=0)
    assert not model.two.norm.weight.is_meta
    assert "two.norm.weight" not in ownership.homes
    assert model.two.norm not in ownership.places(model, 0)
