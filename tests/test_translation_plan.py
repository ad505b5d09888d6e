"""How the planner divides GNMT-16: by the published network's sizes, so that no clock has a say."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerNode
from pl_pipe.partition import Plan
from pl_pipe.partition.known_costs import KnownCosts
from pl_pipe.profiling import record_step
from pl_pipe.recipes.translation.translator import Translator
from pl_pipe.strategies.pipeline.plan_choice import choose_plan

# 1024 wide, 32,000 subwords, 64 sentences of 50 tokens, float32, on devices of 5 TFLOP/s.
WIDTH, VOCABULARY, TOKENS, FLOPS = 1024, 32_000, 64 * 50, 5e12
SMALL = 4
BATCH = (torch.full((2, 4), 5), torch.tensor([4, 3]), torch.full((2, 6), 5))


class Priced(Translator):
    """A narrow GNMT-16 that tells the planner what the published one costs."""

    def __init__(self) -> None:
        super().__init__(16, encoder_layers=8, decoder_layers=8, hidden_size=SMALL, dropout=0.0)

    def pl_pipe_layer_costs(self, batch: Any) -> KnownCosts:
        graph = record_step(self, batch).graph
        modules = dict(self.named_modules())
        nodes = tuple(_priced(node, modules.get(node.module) if node.module else None) for node in graph.nodes)
        named = {node.name: node.module for node in nodes if node.module}
        return KnownCosts(replace(graph, nodes=nodes), named)


def _priced(node: LayerNode, module: nn.Module | None) -> LayerNode:
    weights, width = 0, WIDTH
    if isinstance(module, nn.LSTM):
        weights = 4 * WIDTH * WIDTH * (module.input_size + SMALL) // SMALL
    elif isinstance(module, nn.Embedding):
        weights = WIDTH * VOCABULARY
    elif isinstance(module, nn.Linear):
        width = WIDTH if module.out_features == SMALL else VOCABULARY
        weights = WIDTH * width
    forward_s = 0.0 if isinstance(module, nn.Embedding) else 2 * weights * TOKENS / FLOPS
    output = 4 * TOKENS * width
    return replace(
        node,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        parameter_bytes=4 * weights,
        output_bytes=(output,) * len(node.output_bytes),
        activation_bytes=output,
    )


def sides(plan: Plan) -> list[set[str]]:
    """Whether a stage has layers of the encoder or of the decoder; embeddings go with either."""
    side = {"encoder": "encoder", "decoder": "decoder", "classifier": "decoder"}
    parts = [[name.split(".")[1] for name in stage.modules if name.startswith("network.")] for stage in plan.stages]
    return [{side[part] for part in names if part in side} for names in parts]


@pytest.mark.parametrize("devices", [4, 8])
def test_the_published_network_becomes_a_straight_pipeline(devices: int) -> None:
    """Over 10 Gbit/s."""
    cluster = Cluster.flat(devices, 1.25e9)
    plan = choose_plan(Priced(), BATCH, devices=devices, cluster=cluster, device=torch.device("cpu"))
    assert plan.shape == "-".join(["1"] * devices)
    found = sides(plan)
    assert found[0] == {"encoder"}
    assert found[-1] == {"decoder"}
    order = [side for stage in found for side in sorted(stage, reverse=True)]  # encoder before decoder in a mixed one
    assert order == sorted(order, reverse=True), "the encoder's stages come first"
    assert plan.predicted_step_s < 0.6 * plan.data_parallel_step_s


def test_every_layer_is_a_place_to_cut() -> None:
    """17 LSTMs, each on a stage of its own if one asks for it."""
    model = Priced()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.LSTM)]
    assert len(layers) == 17
    graph = model.pl_pipe_layer_costs(BATCH).graph
    assert set(layers) <= {node.module for node in graph.nodes}
    after = [f"network.encoder.layers.{number}" for number in range(7)]
    plan = choose_plan(model, BATCH, devices=8, split_points=after, device=torch.device("cpu"))
    assert [len([name for name in stage.modules if "encoder.layers" in name]) for stage in plan.stages] == [1] * 7 + [0]
