"""One rank's part of a LightningModule: its stage, the way to the others, and its share of the state.

DividedModel(trainer, settings) ─► stepper.step(…)          forwards and backwards
                                ─► state_dict, optimizer    whole on rank 0, whatever the plan
                                ─► reunite                  an ordinary model again, on every rank
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from pl_pipe.comm import DistributedTransport
from pl_pipe.partition import Plan
from pl_pipe.runtime.gathering import StateOwners
from pl_pipe.runtime.whole_model import WholeModel
from pl_pipe.stages import IDLE, Ownership, Pipe, restore
from pl_pipe.strategies.pipeline_plan import IGNORED, agreed_plan
from pl_pipe.strategies.pipeline_settings import PipelineSettings
from pl_pipe.tensors.trees import map_tensors, tensors_in

_STREAMS = 1_000_003  # stages draw from streams of their own


class DividedModel:
    """With one rank, the whole model."""

    def __init__(self, trainer: L.Trainer, settings: PipelineSettings) -> None:
        module, strategy = trainer.lightning_module, trainer.strategy
        self.module = module
        self.plan: Plan | None = None
        self.stage = 0
        self._device = strategy.root_device
        self._pipe: Pipe | None = None
        self._metrics = [(metric, metric.sync_on_compute) for metric in module.modules() if isinstance(metric, Metric)]
        for metric, _ in self._metrics:
            metric.sync_on_compute = metric._to_sync = False  # only the rank that reports has anything to add up
        if trainer.world_size == 1:
            module.to(self._device)
            self.stepper: WholeModel | Pipe = WholeModel()
            return
        _sync_module_states(module)
        try:
            self.plan = agreed_plan(trainer, settings)
        except BaseException:
            self.close()  # whoever made this refused plan's model may go on with its metrics
            raise
        ranks = [stage.ranks[0] for stage in self.plan.stages]
        self.stage = ranks.index(trainer.global_rank) if trainer.global_rank in ranks else IDLE
        ownership = Ownership.from_plan(module, self.plan, ignore=IGNORED)
        _move_own(module, ownership, self.stage, self._device)
        self._transport = DistributedTransport(device=self._device, ranks=ranks, timeout_s=settings.timeout_s)
        self._pipe = self.stepper = Pipe(
            module,
            ownership,
            stage=self.stage,
            transport=self._transport,
            device=self._device,
            seed=strategy.broadcast(torch.initial_seed()),
        )
        self._owners = StateOwners(module, {name: ranks[home] for name, home in ownership.homes.items()})

    @property
    def stages(self) -> int:
        return 1 if self.plan is None else len(self.plan.stages)

    def seed_stage(self) -> None:
        """Stages draw from streams of their own: with one for all, their dropout masks would be alike."""
        if self.stage > 0:
            torch.manual_seed(torch.initial_seed() + self.stage * _STREAMS)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters() if self._pipe is None else self._pipe.own_named_parameters())

    def wait_for_sends(self, *, before: int) -> None:
        """Lets no more than the last steps' values be under way: nothing else would keep a fast stage from running
        through a whole evaluation ahead of a slow one."""
        if self._pipe is not None:
            self._transport.flush(before=before)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """As Lightning saves it: whole on rank 0."""
        return self.module.state_dict() if self._pipe is None else self._owners.on_first_rank()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As Lightning saves it: whole on rank 0. Parameters keep their numbers, since every rank lists them all."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state = optimizer.state_dict()
        if self._pipe is None:
            return state
        rank = dist.get_rank()
        parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(map_tensors(state["state"], Tensor.cpu), parts)
        for part in parts or []:
            state["state"].update(part)
        state["state"] = dict(sorted(state["state"].items()))
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """The part of a whole optimizer state that belongs to this rank's parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        own = {
            number: state["state"][number]
            for number, parameter in zip(numbers, parameters, strict=True)
            if not parameter.is_meta and number in state["state"]
        }
        optimizer.load_state_dict({"state": own, "param_groups": state["param_groups"]})

    def reunite(self) -> None:
        """Gives every rank the whole model, so that a script can go on with it."""
        if self._pipe is not None:
            self._transport.flush()
            values = self._owners.everywhere()
            for metric, _ in self._metrics:
                _forget_ghosts(metric, self._device)
            self._pipe.close()
            restore(self.module, values, device=self._device)

    def close(self) -> None:
        for metric, sync in self._metrics:
            metric.sync_on_compute = metric._to_sync = sync
        if self._pipe is not None:
            self._pipe.close()
            self._transport.close()


def _move_own(module: nn.Module, ownership: Ownership, stage: int, device: torch.device) -> None:
    """Moves this stage's tensors, and those of no stage, to the device; the others must not take its memory."""
    homes = ownership.homes
    state = (*module.named_parameters(), *module.named_buffers())
    foreign = {id(tensor) for name, tensor in state if homes.get(name, stage) != stage}
    module._apply(lambda tensor: tensor if id(tensor) in foreign else tensor.to(device))  # type: ignore[no-untyped-call]
    module._device = device  # type: ignore[assignment]


def _forget_ghosts(metric: Metric, device: torch.device) -> None:
    """On ranks that have no results, a metric has added up ghosts: it begins anew."""
    ghostly = [name for name, value in vars(metric).items() if any(tensor.is_meta for tensor in tensors_in(value))]
    for name in ghostly:
        default = metric._defaults.get(name)
        vars(metric)[name] = default.detach().clone().to(device) if isinstance(default, Tensor) else None
        if isinstance(default, list):
            vars(metric)[name] = []
