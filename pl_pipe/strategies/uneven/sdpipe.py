"""`strategy="sdpipe"`: several pipelines, whose stages average with one another. Lightning's hooks -> *strategy*.

SD-Pipe (VLDB'23) is pipelines times partial reduce; here the rule among the replicas of a stage is any synchronizer.

    pipeline 0   stage 0 ──► stage 1 ──► stage 2         each pipeline is a PipeDreamStrategy in a world of its own
                    ┆           ┆           ┆            (`pipeline_worlds`); after an update a stage
    pipeline 1   stage 0 ──► stage 1 ──► stage 2         averages with its replicas, and need not wait for other stages

Stages of one pipeline need not average with the same pipelines at the same time. Nothing can come to a standstill: a
stage sends its gradients on before it averages; and of the groups without a deadline the coordinator has one at a time.
"""

import itertools
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from pl_pipe.comm.lifelines import Fault
from pl_pipe.comm.peers import StorePeers
from pl_pipe.comm.summing import PeerSumming
from pl_pipe.errors import ConfigError, refuse_other_lightning
from pl_pipe.partition import Plan
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher
from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy
from pl_pipe.strategies.pipeline.signals import serve_signals
from pl_pipe.strategies.uneven.assembly import Assembly
from pl_pipe.strategies.uneven.membership import Membership, ModelTensors, said_by_coordinator
from pl_pipe.strategies.uneven.pipeline_worlds import PipelineLines, Worlds
from pl_pipe.strategies.uneven.placement import Placement, placement_of
from pl_pipe.strategies.uneven.report import UnevenReport
from pl_pipe.strategies.uneven.rules import make_rule
from pl_pipe.strategies.uneven.sdpipe_epochs import PipelinesEpochs
from pl_pipe.strategies.uneven.sdpipe_loading import PipelinesLoading
from pl_pipe.strategies.uneven.sdpipe_support import Summed, check_plan_options, check_straight
from pl_pipe.strategies.uneven.settings import UnevenSettings
from pl_pipe.strategies.uneven.support import check_epochs, check_workers

_RUNS = itertools.count()
"""Of this process; all ranks count alike, and names in the store must not be used twice."""
_OF_RULES = {field.name for field in fields(UnevenSettings)} - {"synchronizer", "timeout_s"}


class SDPipeStrategy(PipeDreamStrategy):
    """Pipelines that train the same model, each on batches of its own. To what runs inside a pipeline, that is the
    world: `global_rank` and `world_size` are its; `overall_rank` and `is_global_zero` are of all ranks."""

    def __init__(
        self,
        synchronizer: str = "partial_reduce",
        pipelines: int | None = None,
        placement: Any = None,
        plan: str = "auto",
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        """
        Args:
            synchronizer: among the replicas of a stage: `partial_reduce`, `allreduce`, `ad_psgd`, `sma`, `pair`,
                `wave` or `local`.
            pipelines: how many; by default two, or the columns of `placement`.
            placement: of each stage, the device in every pipeline, such as [[0,2],[1,3]].
            plan: `auto` makes the quickest with one device a stage; or the path of such a plan.json.
            options: of PipeDreamStrategy; and of the synchronizer, and `on_fault`, as DataParallelStrategy has them.
        """
        rules = {name: options.pop(name) for name in list(options) if name in _OF_RULES}
        self.uneven = UnevenSettings(synchronizer=synchronizer, timeout_s=timeout_s, **rules)
        check_plan_options(options)
        plan = "straight" if plan == "auto" and options.get("split_points") is None else plan
        super().__init__(plan=plan, timeout_s=timeout_s, **options)
        self._pipelines, self._placement = pipelines, placement
        self._worlds: Worlds | None = None
        self.member = Membership(self.uneven)

    is_all_there_is = False

    # ---- what Lightning asks about ranks

    @property
    def overall_rank(self) -> int:
        return super().global_rank

    @property
    def placement(self) -> Placement:
        devices = self.num_nodes * self.num_processes
        return placement_of(self._placement, self._pipelines, devices=devices, devices_a_node=self.num_processes)

    @property
    def worlds(self) -> Worlds:
        assert self._worlds is not None
        return self._worlds

    @property
    def pipeline(self) -> int:
        """This rank's."""
        return self.worlds.pipeline

    @property
    def living(self) -> list[int]:
        """Pipelines that came to the last reunion."""
        return sorted({self.worlds.placement.place(rank)[0] for rank in self.member.living})

    @property
    def place(self) -> int:
        """Of this rank's pipeline among those that live."""
        return self.living.index(self.pipeline)

    @property
    @override
    def global_rank(self) -> int:
        if self._worlds is None:
            return self.overall_rank
        return self._worlds.members.index(self._worlds.rank)

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._worlds is None else len(self._worlds.members)

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.overall_rank == 0

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if self._worlds is None:
            return self.parallel_devices[self.local_rank]
        return self.parallel_devices[self._worlds.placement.devices[self._worlds.rank] % self.num_processes]

    @property
    def assembly(self) -> Assembly:
        assert self.member.assembly is not None
        return self.member.assembly

    @property
    def report(self) -> UnevenReport:
        return self.member.report

    @property
    def trained_samples(self) -> int:
        """Of all pipelines in this fit, when an epoch has ended."""
        return self.report.samples

    @property
    def saves_within_epochs(self) -> bool:
        return False

    @property
    def _meets_all(self) -> bool:
        """All ranks of all pipelines are at the same point."""
        return self.member.assembly is not None and not self.member.assembly.inside_batch

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._meets_all and not self._failed:
            self.assembly.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.assembly.broadcast(obj, src) if self._meets_all else super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._meets_all:
            return self.assembly.agrees(decision, all_=all)
        return super().reduce_boolean_decision(decision, all)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        loading = getattr(self, "_loading", None)
        return super().process_dataloader(dataloader if loading is None else loading.process(dataloader))

    # ---- setup and teardown

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
        pipelines = self.placement.pipelines  # refused before any process is started
        ranks = (self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = PipelineLauncher(
            *ranks,
            faults=self.faults,
            explain=self._explained,
            spares_others=self.uneven.survives,
            check=partial(check_workers, self.uneven, pipelines),
        )

    @override
    def set_world_ranks(self) -> None:
        self._worlds = None  # so that all ranks count, and one of them is the first
        super().set_world_ranks()

    @override
    def setup_distributed(self) -> None:
        self.member.refuse_gaps()
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        assert self._timeout is not None
        self._worlds = Worlds.join(self.cluster_environment, self.placement, self.overall_rank, timeout=self._timeout)
        self.member.expect(range(len(self._worlds.placement.devices)))
        self._failed = False

    @override
    def _begin_watch(self) -> None:
        """Over the ranks of all pipelines; and the first one begins to decide."""
        worlds = self.worlds
        self.faults.tolerates = self._goes_on_without
        self.faults.begin(self.overall_rank, worlds.gathered)
        self.run_name = f"pl_pipe/sdpipe{next(_RUNS)}"
        stages = {f"stage{stage}": ranks for stage, ranks in enumerate(worlds.placement.stages)}
        sets = {"all": tuple(range(len(worlds.placement.devices))), **stages}
        self.member.begin(self.overall_rank, self.run_name, sets, self.faults, store=worlds.store)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            check_epochs(trainer, "pipelines are at different batches, and meet at the end of an epoch alone")
        super().setup(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            make = Summed if self.uneven.synchronizer == "allreduce" else partial(make_rule, self.uneven)
            self.member.make_rule(self._own_tensors().parameters, make)

    @property
    @override
    def stops_within_epochs(self) -> bool:
        return not self.uneven.lockstep

    @property
    @override
    def spanned_nodes(self) -> int:
        """One, where a pipeline lies within a node, or where nodes have different parts of it."""
        nodes = [self.worlds.placement.devices[rank] // self.num_processes for rank in self.worlds.members]
        counts = {nodes.count(node) for node in nodes}
        return len(set(nodes)) if len(counts) == 1 else 1

    @override
    def arranged(self, plan: Plan) -> Plan:
        """One rank a stage, the last stage's first: as the placement has them."""
        depth = self.worlds.placement.depth
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        if trainer.state.fn is TrainerFn.FITTING:
            check_straight(plan, depth, self.worlds.placement.pipelines)
        stages = enumerate(plan.stages)
        return replace(plan, stages=tuple(replace(stage, ranks=(depth - 1 - number,)) for number, stage in stages))

    @override
    def _prepare_trainer(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        worlds = self.worlds
        places = [worlds.placement.place(rank) for rank in range(len(worlds.placement.devices))]
        self.faults.know_places({rank: "pipeline {}, stage {}".format(*place) for rank, place in enumerate(places)})
        if trainer.state.fn is TrainerFn.FITTING:
            self._groups = itertools.count()
            self.member.join(
                worlds.replicas, self._own_tensors(), among=f"stage{worlds.stage}", called="pipelines",
                new_peers=self._new_peers,
            )  # fmt: skip
            self._stack.callback(self._close_quietly, self.member.exchange)
            self._loading = PipelinesLoading(self, trainer, self._stack, lockstep=self.uneven.lockstep)
            self._stack.callback(delattr, self, "_loading")
            self._epochs = PipelinesEpochs(self, trainer, self._stack, loading=self._loading)
            self.report.name_of = {rank: f"pipeline{place[0]}" for rank, place in enumerate(places)}.__getitem__
            self.report.attach(trainer, rank=self.overall_rank)
            self._stack.callback(self.report.detach, trainer)
        super()._prepare_trainer(trainer, module)

    def _own_tensors(self) -> ModelTensors:
        assert self.divided is not None
        return ModelTensors(self.divided.own_parameters(), self.divided.own_buffers())

    def _new_peers(self) -> StorePeers:
        name = f"{self.run_name}/stage{self.worlds.stage}/{next(self._groups)}"
        ranks = self.worlds.replicas
        return StorePeers(self.worlds.store, name, self.overall_rank, ranks, timeout_s=self.uneven.timeout_s)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        loading = getattr(self, "_loading", None)  # None while a plan is made
        with nullcontext() if loading is None else loading.lengths_known():
            super().setup_optimizers(trainer)

    @override
    def counted(self, loader: Any) -> Any:
        loading = getattr(self, "_loading", None)
        if loading is None:
            raise ConfigError(
                "the length of training (trainer.estimated_stepping_batches) is asked for before the pipelines have "
                "shared out the batches; ask in configure_optimizers or later"
            )
        return loading.counted(loader)

    @override
    def gradient_averaging(self, divided: DividedModel) -> tuple[GradientAveraging | None, int]:
        if self.uneven.synchronizer != "allreduce":
            return None, 1
        peers = self._new_peers()
        self._stack.callback(self._close_quietly, peers)
        return GradientAveraging(PeerSumming(peers, timeout_s=self.uneven.timeout_s)), len(peers.ranks)

    @override
    def _serve_signals(self, trainer: L.Trainer) -> None:
        assert self.faults.lifelines is not None
        lines = PipelineLines(self.faults.lifelines, self.worlds.members, self.pipeline)
        later = self._epochs.ask if trainer.state.fn is TrainerFn.FITTING else None
        signals = serve_signals(self, trainer, self.faults, self._stack, lines=lines, later=later)
        self.faults.on_note = lines.passed_on(signals.hear)

    @override
    def _explained(self, error: BaseException, trainer: L.Trainer | None) -> BaseException:
        explained = super()._explained(said_by_coordinator(error), trainer)
        if not self.leaves_together and not isinstance(error, _TunerExitException):
            self.member.fail(explained, self.faults)
        return explained

    @override
    def teardown(self) -> None:
        self.member.end_rule(failed=self._failed)
        super().teardown()

    @override
    def _part(self) -> None:
        self.member.leave(failed=self._failed)
        self.member.close()

    def _close_quietly(self, groups: Any) -> None:
        if not self._failed:
            groups.close()

    # ---- faults

    def _goes_on_without(self, fault: Fault) -> bool:
        """By the lifelines' thread. A rank that ends takes its pipeline with it; rank 0 decides for all and keeps the
        store, so nobody does without its pipeline."""
        placement = self.worlds.placement
        lost, _ = placement.place(fault.rank)
        if not self.uneven.survives or lost in (0, self.pipeline) or self.member.rule is None:
            return False
        left = placement.pipelines - len({placement.place(rank)[0] for rank in (*self.member.gone, fault.rank)})
        then = f"its pipeline {lost} ends, and training goes on with {left}"
        self.member.lose(fault, placement.members(lost), then=then)
        return True

    # ---- training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.member.enter():
            assert self.member.rule is not None
            self.member.rule.begin_step()
        if self.reports:
            self.report.count(args[0])
        return super().training_step(*args, **kwargs)

    @override
    def before_update(self) -> None:
        if self.member.rule is not None:
            self.member.rule.begin_backward()
            self.member.rule.before_update()

    @override
    def after_update(self) -> None:
        if self.member.rule is not None:
            self.member.updated()
            self.member.rule.begin_step()  # the next forward reads what it leaves

    # ---- the end of an epoch

    def stop_epoch(self) -> None:
        """No pipeline gets another batch in this epoch."""
        self._loading.stop()

    def unite(self, content: dict[str, Any]) -> dict[int, Any]:
        """No pipeline has more batches: everything is averaged, stage by stage. Returns what each rank brought."""
        self.drain()
        return self.member.unite(content, self._own_tensors(), self.optimizers, self._loading)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.member.may_save(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def _evaluated(self, *args: Any) -> Any:
        self.assembly.batches += 1
        return super()._evaluated(*args)
