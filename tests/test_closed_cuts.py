"""Where a plan may cut: operations stay with what they depend on, as the engine runs them."""

import copy
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from ghost_models import MODELS, Outcome, Trial, train_stage
from torch import Tensor, nn
from torch.nn import functional as F

from pl_pipe.cluster import Cluster
from pl_pipe.comm import Direction, LocalNetwork, Message
from pl_pipe.comm.local import LocalTransport
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph, LayerNode
from pl_pipe.partition import Plan, partition, split_by_hand
from pl_pipe.partition.cuts import cuts_of
from pl_pipe.profiling import record_step
from pl_pipe.stages import Ownership


def first_stages(model: nn.Module, batch: Any) -> list[list[str]]:
    """What each cut holds, by module or operation."""
    cuts = cuts_of(record_step(model, batch).graph)
    names = [node.module or node.description for node in cuts.layers]
    return [[name for name, here in zip(names, held, strict=True) if here] for held in cuts.holds_SN[1:-1]]


class Residual(nn.Module):
    """Operations after modules, a module called again, a tied weight, and a parameter that meets the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8))
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x + self.position))
        h = self.act(self.b(h) + h)
        return F.linear(self.c(h).tanh(), self.a.weight)


def test_operations_stay_with_what_they_depend_on() -> None:
    start = ["add", "a.weight", "a"]
    assert first_stages(Residual(), torch.ones(2, 8)) == [
        start,
        [*start, "act"],
        [*start, "act", "b", "add", "act"],
    ]


def test_no_plan_cuts_between_a_module_and_its_operations() -> None:
    graph = record_step(Residual(), torch.ones(2, 8)).graph
    for heavy in graph.nodes:  # wherever the time is, and however much a cut would gain
        nodes = tuple(replace(node, forward_s=1.0 if node == heavy else 0.01) for node in graph.nodes)
        for stages in (2, 3, 4):
            plan = partition(replace(graph, nodes=nodes), cluster=Cluster.flat(stages, 1e12), straight=True)
            stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
            for node in graph.nodes:
                sources = [stage_of[name] for name in graph.digraph.predecessors(node.name) if name != "node0"]
                if not node.module and sources:
                    assert stage_of[node.name] == max(sources), (heavy.name, node.name, plan.stages)
            Ownership.from_plan(Residual(), plan)  # every stage has a module
    with pytest.raises(PlanError, match=r"5 workers and 10 layers that make at most 4 stages; .* plan for 4 workers"):
        partition(graph, cluster=Cluster.flat(5, 1e9), straight=True)


def sent_by_the_engine(trial: Trial, plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes that the stages of a real step send onward, each a thread."""
    origin, network, sizes = trial.build(), LocalNetwork(), {}

    class Counting(LocalTransport):
        def send(self, message: Message, tensor: Tensor) -> None:
            if message.direction is Direction.FORWARD:
                link = message.source, message.target
                sizes[link] = sizes.get(link, 0) + tensor.numel() * tensor.element_size()
            super().send(message, tensor)

    def rank(stage: int) -> None:
        model = copy.deepcopy(origin)
        owners = dict(Ownership.from_plan(model, plan).modules)
        train_stage(trial, model, owners, stage, Counting(network), Outcome())

    with ThreadPoolExecutor(len(plan.stages)) as ranks:
        list(ranks.map(rank, range(len(plan.stages))))
    return sizes


@pytest.mark.parametrize("name", ["residual", "resnet18", "vit_b_32", "swin_t"])
def test_what_is_planned_is_what_the_engine_does(name: str) -> None:
    """Were an operation to run elsewhere than planned, other tensors would travel."""
    residual = Trial(Residual, lambda model, batch: model(batch).pow(2).mean(), [torch.ones(2, 8)])
    trial = residual if name == "residual" else MODELS[name]
    trial = trial._replace(batches=trial.batches[:1])
    graph = record_step(trial.build(), trial.batches[0], step=trial.step).graph
    sized = tuple(replace(node, forward_s=node.total_output_bytes / 1e9) for node in graph.nodes)
    for stages in (2, 4):
        plan = partition(replace(graph, nodes=sized), cluster=Cluster.flat(stages, 1e12), straight=True)
        planned = {(transfer.source, transfer.target): transfer.size_bytes for transfer in plan.transfers}
        assert sent_by_the_engine(trial, plan) == planned


def test_a_split_by_hand_takes_operations_along() -> None:
    graph = record_step(Residual(), torch.ones(2, 8)).graph
    plan = split_by_hand(graph, cluster=Cluster.flat(2, 1e9), split_after=["b"])
    names = [graph.by_name[name].module or graph.by_name[name].description for name in plan.stages[0].nodes]
    assert names == ["Input", "add", "a.weight", "a", "act", "b", "add", "act"]
    (add,) = (node.name for node in graph.nodes if node.description == "add" and node.name in plan.stages[0].nodes[3:])
    with pytest.raises(PlanError, match=rf"leaves no module for stage 1: what runs between b and {add} has no module"):
        split_by_hand(graph, cluster=Cluster.flat(3, 1e9), split_after=["b", add])


def random_graph(seed: int, *, named: bool = True) -> LayerGraph:
    """Seven layers, about half of them operations; each takes one or two before it, or the batch."""
    choice = random.Random(seed)
    nodes = [LayerNode("n0", "Input", 0.0, 0.0, (1,), 0)]
    edges = []
    for number in range(1, 8):
        module = f"m{number}" if named and (number == 1 or choice.random() < 0.5) else ""
        nodes.append(LayerNode(f"n{number}", "Layer", 0.0, 0.0, (1,), 0, module=module))
        sources = {choice.randrange(1 if number > 1 and not module else 0, number) for _ in range(2)}
        edges += [(f"n{source}", f"n{number}") for source in sorted(sources)]
    return LayerGraph(tuple(nodes), tuple(edges))


@pytest.mark.parametrize("seed", range(30))
def test_closed_cuts_are_all_considered_and_no_others(seed: int) -> None:
    for named in (True, False):
        graph = random_graph(seed, named=named)
        layers = [node.name for node in graph.nodes[1:]]
        needs = {name: set(graph.digraph.predecessors(name)) - {"n0"} for name in layers}
        follows = {name for name in layers if named and not graph.by_name[name].module and needs[name]}
        wanted = {
            frozenset(held)
            for size in range(len(layers) + 1)
            for held in itertools.combinations(layers, size)
            if all(needs[name] <= set(held) for name in held)
            and not any(needs[name] <= set(held) for name in follows - set(held))
        }
        cuts = cuts_of(graph)
        order = [node.name for node in cuts.layers]
        found = [frozenset(name for name, here in zip(order, held, strict=True) if here) for held in cuts.holds_SN]
        assert len(found) == len(set(found))
        assert set(found) == wanted
