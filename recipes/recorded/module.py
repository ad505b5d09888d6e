"""A published profile as a LightningModule: real processes, messages and schedules; recorded compute.

graph.txt ──► Record ──► one RecordedLayer a node, called in the graph's own order ──► any strategy
                  └────► pl_pipe_layer_costs: the planner takes the record's times, nothing is measured
"""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.partition.known_costs import KnownCosts
from pl_pipe.strategies import PipeDreamStrategy

from .layers import RecordedLayer
from .record import Record


class RecordedLayers(nn.ModuleDict):
    """The layers of a record, called as one module, as networks are: where a rank has no part in a batch, one call is
    repeated from memory and not hundreds."""

    def __init__(self, record: Record, *, dilation: float, batch_size: int) -> None:
        super().__init__(
            {
                name: RecordedLayer(record.graph.by_name[node], dilation=dilation, batch_size=batch_size)
                for node, name in record.names.items()
            }
        )
        self._record = record

    @override
    def forward(self, batch: Tensor) -> list[Tensor]:
        """The outputs of the record's last layers."""
        record = self._record
        outputs: dict[str, Tensor] = {}
        for node, name in record.names.items():
            sources = [outputs[source] for source in record.inputs_of(node)] or [batch]
            outputs[node] = self[name](len(batch), *sources)
        return [outputs[node] for node in record.outputs]


class RecordedModel(L.LightningModule):
    """Layers that sleep for the recorded times × `dilation`, with weights and outputs of the recorded sizes."""

    def __init__(self, profile: str | None = None, dilation: float = 20.0, batch_size: int = 128) -> None:
        super().__init__()
        if not math.isfinite(dilation) or dilation <= 0:
            raise ConfigError(f"recipe.dilation={dilation} is no factor for times; give a number above 0, such as 20")
        if batch_size < 1:
            raise ConfigError(f"recipe.batch_size={batch_size} is too small; give the record's, 1 or more")
        self.save_hyperparameters()
        record = Record.read(profile)
        self.layers = RecordedLayers(record, dilation=dilation, batch_size=batch_size)
        self.dilation, self.batch_size = dilation, batch_size
        self._record = record

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, *others = (output.sum() for output in self.layers(batch))
        loss: Tensor = sum(others, first)
        self.log("train_loss", loss, batch_size=len(batch))
        return loss

    def pl_pipe_layer_costs(self, batch: Any) -> KnownCosts:
        """What the planner would otherwise measure: the record's own graph, on this model's clock."""
        record = self._record
        modules = {node: f"layers.{name}" for node, name in record.names.items()}
        return KnownCosts(record.dilated(self.dilation, share=len(batch) / self.batch_size), modules, self.dilation)

    @override
    def setup(self, stage: str) -> None:
        for layer in self.layers.values():
            assert isinstance(layer, RecordedLayer)
            layer.gives_gradient = not isinstance(self.trainer.strategy, PipeDreamStrategy)

    @override
    def on_fit_start(self) -> None:
        rank_zero_info(
            f"recorded compute: times are {self.dilation:g} times the record's, so a link of 10 Gbit/s is one of "
            f"{10_000 / self.dilation:g} Mbit/s here, and a step of 1 s stands for {1000 / self.dilation:g} ms"
        )

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Standstill(self.parameters())


class Standstill(torch.optim.Optimizer):
    """Leaves the weights as they are, without touching them: a profile has no time for the update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
