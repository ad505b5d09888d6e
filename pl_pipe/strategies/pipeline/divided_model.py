"""One rank's part of a LightningModule: its stage, the way to the others, and its share of the state.

DividedModel(trainer, settings) ─► stepper.step(…)          forwards and backwards
                                ─► state_dict, optimizer    whole on rank 0, whatever the plan
                                ─► reunite                  an ordinary model again, on every rank
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn
from torch.optim import Optimizer

from pl_pipe.comm import WIRE_DTYPES, DistributedSumming, DistributedTransport, MessageListener
from pl_pipe.comm.topology import NATIVE, AdaptableSums, SumGroups
from pl_pipe.partition import Plan
from pl_pipe.runtime.gathering import StateOwners
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.runtime.replica_buffers import ReplicaBuffers
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.runtime.whole_model import WholeModel
from pl_pipe.stages import IDLE, Ownership, Pipe, restore
from pl_pipe.stages.placement import place
from pl_pipe.strategies.pipeline.devices import agreed_backend
from pl_pipe.strategies.pipeline.metric_calls import metrics_apart
from pl_pipe.strategies.pipeline.plan import IGNORED, FirstBatch, agreed_plan
from pl_pipe.strategies.pipeline.ranks import of_all_ranks
from pl_pipe.strategies.pipeline.settings import PipelineSettings
from pl_pipe.tensors.ghosts import home_of
from pl_pipe.tensors.trees import map_tensors

_STREAMS = 1_000_003  # ranks draw from streams of their own


class DividedModel:
    """With one rank, the whole model."""

    def __init__(self, trainer: L.Trainer, settings: PipelineSettings) -> None:
        module, strategy = trainer.lightning_module, trainer.strategy
        devices = getattr(strategy, "parallel_devices", [strategy.root_device])
        backend = agreed_backend(settings.backend, devices, strategy.root_device)
        self.module = module
        self.plan: Plan | None = None
        self.stage = self.place = 0
        """This rank's stage, and its place among the stage's replicas."""
        self._rank = trainer.global_rank
        self._device = strategy.root_device
        self.first_batch: FirstBatch | None = None
        """On rank 0, what the plan was made with."""
        self._copies: list[tuple[nn.Module, StateOwners, torch.device]] = []
        self.drops_messages = False
        """Some that are under way will not be taken, after an error in the middle of a batch."""
        self._pipe: Pipe | None = None
        self._replicas: Any = None
        """The process group of this rank's stage, if that has several ranks."""
        self._buffers: ReplicaBuffers | None = None
        self._homes: Mapping[str, int] = {}
        self._sums: AdaptableSums | None = None
        """What adds up the replicas' gradients, unless the backend does."""
        if trainer.world_size == 1:
            module.to(self._device)
            self.stepper: WholeModel | Pipe = WholeModel()
            return
        _sync_module_states(module)
        with metrics_apart(module):
            self.plan, self.first_batch = agreed_plan(trainer, settings)
        ranks = [stage.ranks for stage in self.plan.stages]
        self.stage = next((stage for stage, own in enumerate(ranks) if self._rank in own), IDLE)
        self.place = ranks[self.stage].index(self._rank) if self.stage != IDLE else 0
        ownership = Ownership.from_plan(module, self.plan, ignore=IGNORED)
        _move_own(module, ownership, self.stage, self._device)
        self._transport = DistributedTransport(
            device=self._device,
            ranks=ranks,
            timeout_s=settings.timeout_s,
            backend=backend,
        )
        with closing_on_error(self._transport):
            self._pipe = self.stepper = Pipe(
                module,
                ownership,
                stage=self.stage,
                transport=self._transport,
                device=self._device,
                seed=strategy.broadcast(torch.initial_seed()),
                wire_dtype=None if settings.wire_dtype is None else WIRE_DTYPES[settings.wire_dtype],
                recompute=settings.recompute,
                replicated=any(len(own) > 1 for own in ranks),
            )
        self._homes = ownership.homes
        self._owners = StateOwners(module, ownership.homes, [own[0] for own in ranks])
        self.timeout_s = settings.timeout_s
        for stage, own in enumerate(ranks):
            if len(own) > 1:
                group = dist.new_group(list(own), timeout=timedelta(seconds=settings.timeout_s))  # by all ranks
                groups = None
                if settings.topology != NATIVE:
                    groups = SumGroups.of(own, timeout_s=settings.timeout_s)  # by all ranks
                if stage == self.stage:
                    self._replicas = group
                    if groups is not None:
                        self._sums = AdaptableSums(
                            settings.topology,
                            (socket.gethostname(), getattr(strategy, "node_rank", 0)),
                            native=group,
                            groups=groups,
                            timeout_s=settings.timeout_s,
                            device=self._device,
                        )
                    names = [name for name, _ in module.named_buffers() if ownership.homes.get(name) == stage]
                    self._buffers = ReplicaBuffers(module, names, group=group, ranks=own, stage=stage)

    def divide_copy(self, copy: nn.Module) -> StateOwners:
        """Of the whole module, as that is divided; all ranks get rank 0's numbers. It is reunited with the module."""
        assert self.plan is not None
        device = next((parameter.device for parameter in copy.parameters()), self._device)
        _sync_module_states(copy)
        place(copy, self.pipe.ownership, self.stage)
        owners = StateOwners(copy, self._homes, [stage.ranks[0] for stage in self.plan.stages])
        self._copies.append((copy, owners, device))
        return owners

    @property
    def all_run_steps(self) -> bool:
        """Each rank runs every step, and knows whether another one has left it: none is idle, none takes turns."""
        assert self.plan is not None
        return self.plan.round == 1 and self.plan.ranks == dist.get_world_size()

    @property
    def is_last_stage(self) -> bool:
        return self.plan is None or self.stage == len(self.plan.stages) - 1

    @property
    def reporters(self) -> tuple[int, ...]:
        """The ranks of the last stage."""
        return (0,) if self.plan is None else self.plan.stages[-1].ranks

    @property
    def in_flight(self) -> int:
        """Mini-batches after which a message has certainly been received.

        Who has received mini-batch k from an earlier stage knows that it had done all that comes before its forward of
        k, the backward of k - (warm-up + 1) · replicas included; which is at most twice the ranks back.
        """
        return 1 if self.plan is None else 2 * self.plan.ranks

    @property
    def pipe(self) -> Pipe:
        assert self._pipe is not None
        return self._pipe

    def step_numbers(self) -> StepNumbers:
        return StepNumbers(round_size=1 if self.plan is None else self.plan.round, reporters=len(self.reporters))

    def has_turn(self, number: int) -> bool:
        """Whether a step is this rank's, among the replicas of its stage."""
        return self.plan is None or self.stage == IDLE or number % self.plan.replicas[self.stage] == self.place

    def averaging(self) -> GradientAveraging | None:
        if self._replicas is None:
            return None
        assert self.plan is not None
        if self._sums is not None:
            return GradientAveraging(self._sums.summing)
        ranks = self.plan.stages[self.stage].ranks
        return GradientAveraging(DistributedSumming(self._replicas, ranks, timeout_s=self.timeout_s))

    def seed_stage(self) -> None:
        """Ranks draw from streams of their own: with one for all, their dropout masks would be alike."""
        if self.stage > 0 or self.place > 0:
            torch.manual_seed(torch.initial_seed() + (self.stage + self.place * self.stages) * _STREAMS)

    @property
    def stages(self) -> int:
        return 1 if self.plan is None else len(self.plan.stages)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters() if self._pipe is None else self._pipe.own_named_parameters())

    def own_buffers(self) -> dict[str, Tensor]:
        """Of this rank's stage; what belongs to no stage is each rank's own."""
        found = {}
        for name, buffer in self.module.named_buffers():
            home = home_of(buffer)
            if (self._homes.get(name) if home is None else home) == self.stage:
                found[name] = buffer
        return found

    @property
    def loads_batches(self) -> bool:
        """Whether this rank has a stage, and the numbers of its batches."""
        return self._pipe is not None and self._pipe.batch_is_here

    def share_settings(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """What `read` gives by name is alike on all ranks, and steps must leave it so."""
        if self._pipe is not None:
            self._pipe.shared_settings = read

    @contextmanager
    def attended(self, look: Callable[[int, float], None]) -> Iterator[None]:
        """Within the block, `look` is called with the rank that this one waits for, as long as it does."""
        self._transport.while_waiting = look
        try:
            yield
        finally:
            self._transport.while_waiting = None

    def divide_batches(self, *, whole: bool, in_parts: bool) -> None:
        """How steps are going to run: one whole batch after the other, or once for each part of a batch."""
        if self._pipe is not None:
            self._pipe.whole_batches, self._pipe.in_parts = whole, in_parts

    def agree_on_buffers(self) -> None:
        """All replicas of a stage must ask at the same point."""
        if self._buffers is not None:
            self._buffers.agree()

    def wait_for_sends(self, *, before: int) -> None:
        """Lets no more than the last steps' values be under way: nothing else would keep a fast stage from running
        through a whole evaluation ahead of a slow one."""
        if self._pipe is not None:
            self._transport.flush(before=before)

    def listen_to_messages(self, listener: MessageListener | None) -> None:
        if self._pipe is not None:
            self._transport.listen = listener

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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {number: one for number, one in state["state"].items() if not parameters[number].is_meta}
        own = map_tensors(mine, Tensor.cpu) if self.place == 0 else {}
        state["state"] = {number: one for number, one in state["state"].items() if number in mine}
        dist.gather_object(own, parts)
        for part in parts or []:
            state["state"].update(part)
        state["state"] = dict(sorted(state["state"].items()))
        return state

    def keep_own_state(self, optimizer: Optimizer) -> None:
        """Drops what an optimizer made at once (Adagrad) for parameters of other stages, which hold no numbers."""
        for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
            del optimizer.state[parameter]

    def adopt(self, optimizer: Optimizer) -> None:
        """Gives an optimizer that was made of the whole model the parameters that there are now."""
        if self._pipe is None:
            return
        for group in optimizer.param_groups:
            group["params"] = [self._pipe.exchanged.get(parameter, parameter) for parameter in group["params"]]

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

    def reunite(self, optimizers: Sequence[Optimizer], kept_by: Mapping[str, Any]) -> None:
        """Gives every rank the whole model, so that a script can go on with it, and rank 0 the optimizers' state.

        What `kept_by` (callbacks) keep of values of other stages is on all ranks too.
        """
        if self._pipe is not None:
            if not self.drops_messages:
                self._transport.flush()
            states = [self.optimizer_state(optimizer)["state"] for optimizer in optimizers]
            for optimizer in optimizers:
                self.keep_own_state(optimizer)
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            values = self._owners.everywhere()
            self._pipe.forget_ghosts(kept_by, of_all_ranks)
            self._pipe.close()
            restore(self.module, values, device=self._device)
            for copy, owners, device in self._copies:
                restore(copy, owners.everywhere(), device=device)
            for optimizer, state in zip(optimizers, states, strict=True):
                self._give_whole_parameters(optimizer, names, state)

    def _give_whole_parameters(self, optimizer: Optimizer, names: Mapping[int, str], state: Mapping[int, Any]) -> None:
        number = 0
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.is_meta and id(parameter) in names:
                    group["params"][index] = whole = self.module.get_parameter(names[id(parameter)])
                    if number in state:
                        optimizer.state[whole] = state[number]
                number += 1

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._transport.close()
            if self._sums is not None:
                self._sums.close(together=True)
                self._sums = None
            if self._replicas is not None:
                dist.destroy_process_group(self._replicas)
                self._replicas = self._buffers = None


@contextmanager
def closing_on_error(transport: DistributedTransport) -> Iterator[None]:
    """Who fails within the block has nobody yet who would give the transport's process groups back."""
    try:
        yield
    except BaseException:
        transport.close()
        raise


def _move_own(module: nn.Module, ownership: Ownership, stage: int, device: torch.device) -> None:
    """Moves this stage's tensors, and those of no stage, to the device; the others must not take its memory."""
    homes = ownership.homes
    state = (*module.named_parameters(), *module.named_buffers())
    foreign = {id(tensor) for name, tensor in state if homes.get(name, stage) != stage}
    module._apply(lambda tensor: tensor if id(tensor) in foreign else tensor.to(device))  # type: ignore[no-untyped-call]
    module._device = device  # type: ignore[assignment]
