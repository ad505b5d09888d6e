"""The plan that all ranks of a pipeline follow: rank 0 makes it, all agree on it. trainer -> *plan* -> stages."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors.data_connector import _check_dataloader_iterable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import IterableDataset
from torchmetrics import Metric

from pl_pipe.cluster import Cluster
from pl_pipe.errors import ConfigError, DataError, PlanError, PlPipeError
from pl_pipe.partition import Plan
from pl_pipe.partition.known_costs import known_costs
from pl_pipe.profiling.preserve import RandomState
from pl_pipe.runtime.loader_generators import generators_kept
from pl_pipe.runtime.micro_batches import divided_or_whole, least_samples
from pl_pipe.schedule import FLUSHING
from pl_pipe.strategies.pipeline.devices import chosen_backend
from pl_pipe.strategies.pipeline.loss_comparison import warn_of_other_loss
from pl_pipe.strategies.pipeline.plan_choice import choose_plan, evaluation_plan, lockstep_plan, plan_digest
from pl_pipe.strategies.pipeline.plan_comparison import simulated_step_s
from pl_pipe.strategies.pipeline.plan_options import MADE
from pl_pipe.strategies.pipeline.plan_report import plan_report
from pl_pipe.strategies.pipeline.run_cluster import LOCAL, PROBE, assumed_cluster, fitting, probed_cluster, read_for
from pl_pipe.strategies.pipeline.settings import PipelineSettings
from pl_pipe.strategies.pipeline.trainer_parts import as_in_training, on_its_own, optimizers_on_demand, why_in_lockstep

IGNORED = (Metric,)
"""Modules that belong to no stage: each rank keeps its own, and the one that reports has the numbers."""

EVALUATION = {
    TrainerFn.VALIDATING: ("validate_loop", "validation_step"),
    TrainerFn.TESTING: ("test_loop", "test_step"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step"),
}


class FirstBatch(NamedTuple):
    """What a plan is made with, and the loaders that it came from."""

    content: Any
    loaders: tuple[Any, ...]
    in_turn: bool
    """One after another; else a batch has something of each."""
    made: Any
    """What `train_dataloader()`, or one of its kind, has returned."""
    whole: Any = None
    """The batch, of which the content may be a part."""


def agreed_plan(trainer: L.Trainer, settings: PipelineSettings) -> tuple[Plan, FirstBatch | None]:
    """Rank 0's plan, on every rank; an error that it meets is every rank's. With it, on rank 0, the batch it is for."""
    strategy = trainer.strategy
    pipeline: Any = strategy
    batch = None
    answer: Plan | PlPipeError
    answer = PlanError("no plan")
    own: PlPipeError | None = None
    probed = probed_cluster() if _wants_probe(trainer, settings) else None
    try:
        why = why_in_lockstep(trainer.lightning_module) if trainer.state.fn is TrainerFn.FITTING else None
        if why is not None:
            if strategy.is_global_zero:
                answer = lockstep_plan(
                    trainer.lightning_module,
                    devices=trainer.world_size,
                    split_points=settings.split_points,
                    plan=settings.plan,
                    replicas=settings.replicas,
                    why=why,
                )
        elif strategy.is_global_zero:
            batch = _planned_with(trainer, settings)  # loads as all ranks do, who may wait for one another there
            with on_its_own(trainer):
                chosen = answer = pipeline.arranged(_plan(trainer, settings, batch, probed))
                _compare_losses(trainer, settings, chosen, batch)
        else:
            first_batch(trainer, _loop_of(trainer), only_streams=True)
    except PlPipeError as error:
        answer = own = error
    except Exception as error:  # of the user's model or data: it keeps its traceback here
        strategy.broadcast(PlanError(f"rank {trainer.global_rank} failed while planning: {error!r}"))
        raise
    answer = strategy.broadcast(answer)
    if own is not None:
        raise own  # rank 0, whose answer came, does not know of another rank's
    if isinstance(answer, PlPipeError):
        raise answer
    _check_agreement(trainer, answer)
    if strategy.is_global_zero:
        rounds = settings.schedule == "pipedream" and settings.update == "round"
        simulated_s = simulated_step_s(answer, settings.schedule) if answer.single_device_step_s else None
        rank_zero_info(plan_report(answer, rounds=rounds, simulated_s=simulated_s))
    return answer, batch


def _compare_losses(trainer: L.Trainer, settings: PipelineSettings, plan: Plan, batch: FirstBatch) -> None:
    count = settings.microbatches(plan)
    if trainer.state.fn is not TrainerFn.FITTING or count == 1 or batch.whole is None:
        return
    if known_costs(trainer.lightning_module, batch.content) is not None:
        return  # it stands for another model, whose losses nobody knows
    wanted, least = settings.num_microbatches is not None, least_samples(trainer.lightning_module)
    parts = divided_or_whole(batch.whole, count, least=least, wanted=wanted)
    if len(parts) > 1:
        module, context = trainer.lightning_module, trainer.precision_plugin.train_step_context
        with optimizers_on_demand(trainer, module), as_in_training(trainer, batch.made):
            warn_of_other_loss(module, batch.whole, parts, device=trainer.strategy.root_device, context=context)


def _wants_probe(trainer: L.Trainer, settings: PipelineSettings) -> bool:
    return settings.cluster == PROBE and trainer.state.fn is TrainerFn.FITTING


def _cluster(trainer: L.Trainer, settings: PipelineSettings) -> Cluster | None:
    """The links to plan for, where they were not measured; a plan that is read has its own."""
    if settings.plan not in MADE:
        return None
    if settings.cluster == LOCAL:
        pipeline: Any = trainer.strategy
        carrier = chosen_backend(settings.backend, pipeline.parallel_devices)
        return assumed_cluster(trainer.world_size, backend=carrier, nodes=pipeline.spanned_nodes)
    if isinstance(settings.cluster, Cluster):
        return fitting(settings.cluster, trainer.world_size, source="the cluster group")
    return read_for(Path(settings.cluster).expanduser(), trainer.world_size)


def _planned_with(trainer: L.Trainer, settings: PipelineSettings) -> FirstBatch:
    batch = first_batch(trainer, _loop_of(trainer))
    assert batch is not None
    if trainer.state.fn is not TrainerFn.FITTING:
        return batch
    count = settings.microbatches_expected(trainer.world_size)
    wanted, least = settings.num_microbatches is not None, least_samples(trainer.lightning_module)
    part = divided_or_whole(batch.content, count, least=least, wanted=wanted)[0]
    return batch._replace(content=part.content, whole=batch.content)


def _plan(trainer: L.Trainer, settings: PipelineSettings, found: FirstBatch, probed: Cluster | None) -> Plan:
    batch = found.content
    module, strategy = trainer.lightning_module, trainer.strategy
    devices = trainer.world_size
    plugin = trainer.precision_plugin
    autocast = torch.bfloat16 if isinstance(plugin, MixedPrecision) else None
    if trainer.state.fn is TrainerFn.FITTING:
        with optimizers_on_demand(trainer, module), as_in_training(trainer, found.made):
            return choose_plan(
                module,
                batch,
                devices=devices,
                plan=settings.plan,
                split_points=settings.split_points,
                replicas=settings.replicas,
                cluster=probed or _cluster(trainer, settings),
                schedule=settings.schedule,
                memory_bytes=_memory_bytes(strategy),
                device=strategy.root_device,
                autocast_dtype=autocast,
                ignore=IGNORED,
                reads_bind=not (settings.schedule in FLUSHING and settings.microbatches_expected(devices) == 1),
            )
    assert trainer.state.fn is not None
    _, hook = EVALUATION[trainer.state.fn]
    return evaluation_plan(
        module,
        batch,
        step_of(hook, dataloader_idx=0 if len(found.loaders) > 1 and found.in_turn else None),
        devices=devices,
        device=strategy.root_device,
        autocast_dtype=autocast,
        ignore=IGNORED,
    )


def _memory_bytes(strategy: Any) -> float | None:
    """Of a rank: its part of a device that several share."""
    device = strategy.root_device
    if device.type != "cuda":
        return None
    ranks = max(1, list(strategy.parallel_devices).count(device))
    return float(torch.cuda.get_device_properties(device).total_memory) / ranks


def _loop_of(trainer: L.Trainer) -> str:
    assert trainer.state.fn is not None
    return "fit_loop" if trainer.state.fn is TrainerFn.FITTING else EVALUATION[trainer.state.fn][0]


def first_batch(trainer: L.Trainer, loop: str, *, only_streams: bool = False) -> FirstBatch | None:
    """A batch as the loop's loader gives it; nobody's random numbers are touched.

    With `only_streams` it is fetched only from a data set that goes on where it was left: what planning takes from it
    on one rank must be taken on all.
    """
    before = RandomState()
    try:
        source = getattr(trainer, loop)._data_source
        loader = _made_once(source)
        if isinstance(loader, Iterator) and not isinstance(loader, CombinedLoader):
            raise ConfigError(
                f"the data loader ({type(loader).__name__}) can be iterated only once, so planning would take its "
                f"first batch away; give one that can be iterated again, such as a DataLoader"
            )
        mode = "max_size_cycle" if loop == "fit_loop" else "sequential"  # Lightning's own defaults
        combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, mode)  # type: ignore[arg-type]
        streams = [part for part in combined.flattened if isinstance(getattr(part, "dataset", None), IterableDataset)]
        if only_streams and not streams:
            return None
        with generators_kept(combined.flattened):
            found = _first_of(combined, source, trainer)
    finally:
        before.restore()
    if found is None:
        raise DataError(f"the data loader of {loop} gave no batch, so there is nothing to plan with")
    content, in_turn = trainer.precision_plugin.convert_input(found[0]), combined._mode == "sequential"
    return FirstBatch(content, tuple(combined.flattened), in_turn, loader)


def _first_of(combined: CombinedLoader, source: Any, trainer: L.Trainer) -> Any:
    try:
        return next(iter(combined), None)
    except TypeError:
        assert trainer.state.fn is not None
        for part in combined.flattened:  # Lightning's words for what is no loader
            _check_dataloader_iterable(part, source, trainer.state.fn)
        raise


def _made_once(source: Any) -> Any:
    """The source's loader, which is also what the run will get: `train_dataloader()` is called as often as ever.

    It is made anew where numbers have been drawn since, so that what it draws is what it draws in a single process.
    """
    if not source.is_module():
        return source.dataloader()
    before = RandomState()
    loader = source.dataloader()
    after = RandomState()

    def given() -> Any:
        vars(source).pop("dataloader", None)
        if not before.is_current():
            return source.dataloader()
        after.restore()
        return loader

    vars(source)["dataloader"] = given
    return loader


def step_of(hook: str, *, dataloader_idx: int | None = None) -> Callable[[nn.Module, Any], Any]:
    """Calls a step as Lightning calls it with its first batch, of several loaders where it has an index."""

    def run(module: nn.Module, batch: Any) -> Any:
        step = getattr(module, hook)
        indices = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
        if dataloader_idx is not None:
            indices.append(dataloader_idx)
        return step(batch, *indices)

    return run


def _check_agreement(trainer: L.Trainer, plan: Plan) -> None:
    """All ranks must have built the same model, and hold the same plan for it."""
    state = trainer.lightning_module.state_dict()
    shapes = [(name, list(value.shape)) for name, value in state.items() if isinstance(value, torch.Tensor)]
    mine = [plan_digest(plan), hashlib.sha256(json.dumps(shapes).encode()).hexdigest()]
    everyone: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs[1] != mine[1]:
            raise PlanError(
                f"rank {rank} has built another model than rank {trainer.global_rank}: names or shapes of its "
                f"parameters differ; build it alike on all ranks"
            )
        if theirs[0] != mine[0]:
            raise PlanError(f"rank {rank} holds another plan than rank {trainer.global_rank}; start again")
