"""What the ranks of a job do: Trainer calls on a small model, and notes of all that came of them."""

import importlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from pipedream_models import loader, make
from torch import Tensor

import pl_pipe  # noqa: F401 - registers the strategies' names
from pl_pipe.callbacks import PipelineTimeline
from pl_pipe.cluster import Cluster
from pl_pipe.comm import notices
from pl_pipe.partition import write_plan
from pl_pipe.strategies import AutoStrategy, PipeDreamStrategy
from pl_pipe.strategies.pipeline.plan_choice import choose_plan
from pl_pipe.tensors.ghosts import outside_steps

SPLITS = {
    1: [],
    2: ["layers.1"],
    3: ["layers.0", "layers.2"],
    4: ["layers.0", "layers.1", "layers.2"],
}
"""Of an Mlp's four layers, so that its reference knows the stages."""
TIMEOUT_S = 20.0

notices.WORTH_BYTES = 0  # the models here are small


class Rank:
    """Who runs, and what it notes down."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.notes: dict[str, Any] = {}

    def strategy(self, settings: Mapping[str, Any] | str | None) -> Any:
        """The trainer's; a run with one rank is the plain one unless settings are given.

        A plan that nobody names is straight: which one is quickest depends on measured times.
        """
        if settings is None and self.ranks == 1:
            return "auto"
        if isinstance(settings, str):
            return settings
        given = {"timeout_s": TIMEOUT_S, **(settings or {})}
        if given.pop("chosen", False):
            return AutoStrategy(**given)
        if not {"plan", "split_points", "replicas"} & given.keys():
            given["plan"] = "straight"
        return PipeDreamStrategy(**given)


class Watch(L.Callback):
    """Notes what every callback could see."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.listened: list[bool] = []
        """Whether the executor reported what it did in the batch."""
        self.validated: list[dict[str, float]] = []
        self.batches: list[Any] = []
        self.ends: list[int] = []
        """How many batches had been trained with at each validation."""
        self.initial: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        with outside_steps():  # in which hooks see the whole model
            self.initial = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
            self.notes["names"] = [name for name, _ in module.named_parameters()]
            self.notes["meta"] = [name for name, p in module.named_parameters() if p.is_meta]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # On other ranks of a pipeline too it could be looked at, but would be waited for.
        waits = isinstance(trainer.strategy, PipeDreamStrategy) and trainer.strategy.is_all_there_is
        is_known = trainer.is_global_zero or not waits
        self.losses.append(float(outputs["loss"]) if is_known else math.nan)
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        executor = getattr(trainer.strategy, "executor", None)
        self.listened.append(executor is not None and executor.listen is not None)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append(numbers(trainer.callback_metrics))
        self.ends.append(len(self.batches))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """While the model is still divided."""
        names = {id(p): name for name, p in module.named_parameters()}
        self.notes["with_state"] = [names[id(p)] for p in trainer.optimizers[0].state]
        self.notes["state_on"] = sorted(
            {
                str(v.device)
                for state in trainer.optimizers[0].state.values()
                for v in state.values()
                if torch.is_tensor(v)
            }
        )

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.notes["checkpoint_io"] = type(trainer.strategy.checkpoint_io).__name__
        executor = getattr(trainer.strategy, "executor", None)
        if executor is not None:
            self.notes.update(
                peak=executor.versions.peak,
                warmup=executor.settings.warmup,
                drained=executor.is_drained,
                plan=trainer.strategy.divided.plan,
                stage=trainer.strategy.divided.stage,
                own=sorted(trainer.strategy.divided.own_parameters()),
            )


class Strike(L.Callback):
    """What befalls one rank in the middle of a step, with batches in flight: how it is done, by name."""

    def __init__(self, *, rank: int | None, how: str, batch: int = 3, evaluating: bool = False) -> None:
        """Without a rank, all of them."""
        self.rank, self.how, self.batch, self.evaluating = rank, how, batch, evaluating

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if not self.evaluating:
            self.strike(trainer, trainer.fit_loop.epoch_loop.batch_idx)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self.evaluating:
            self.strike(trainer, batch_idx)

    def strike(self, trainer: Any, batch: int) -> None:
        if batch != self.batch or self.rank not in (None, trainer.global_rank):
            return
        (Path(trainer.default_root_dir) / f"struck{trainer.global_rank}").touch()
        if self.how == "memory":
            raise MemoryError("12 GiB wanted")
        if self.how == "cuda memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB")
        if self.how == "sleep":
            time.sleep(100)
        else:
            for name in self.how.split():
                os.kill(os.getpid(), getattr(signal, name))


def digest(batch: Any) -> float:
    """Tells batches apart, also the order within them."""
    first = batch if torch.is_tensor(batch) else batch[0]
    if first.is_meta:
        return math.nan
    values = first.detach().double()
    return float((values * torch.linspace(1, 2, values.numel(), dtype=torch.float64).view_as(values)).sum())


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def fit(
    me: Rank,
    *,
    model: str = "Mlp",
    seed: int = 0,
    optimizer: str = "momentum",
    scheduler: str | None = None,
    data: Mapping[str, Any] | None = None,
    validation: bool = True,
    strategy: Mapping[str, Any] | str | None = None,
    split: bool = False,
    bandwidth: float | None = None,
    trainer: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    early: Mapping[str, Any] | None = None,
    ckpt_path: str | None = None,
    calls: Sequence[str] = ("fit",),
    differ: str | None = None,
    strike: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    slurm: bool = False,
    timeline: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trainer calls one after the other; `split` cuts an Mlp where the reference expects it. With a `bandwidth` the
    strategy may read of it in `cluster.json`."""
    notes = me.notes
    if timeline is not None and differ == "clocks":  # as on machines that were started at different times
        own, ahead_s = time.perf_counter, 1000.0 * me.rank
        time.perf_counter = lambda: own() + ahead_s
    L.seed_everything(seed)
    module = make(model, seed=seed + (me.rank if differ == "weights" else 0), optimizer=optimizer, scheduler=scheduler)
    watch = Watch()
    callbacks: list[Any] = [watch]
    if checkpoint is not None:
        callbacks.append(ModelCheckpoint(me.folder / "kept", **checkpoint))
    if early is not None:
        callbacks.append(EarlyStopping(**early))
    if strike is not None:
        callbacks += [Strike(**one) for one in (strike if isinstance(strike, list) else [strike])]
    if timeline is not None:
        callbacks.append(PipelineTimeline(**{"folder": me.folder / "timeline", **timeline}))
    if split and me.ranks > 1:
        assert not isinstance(strategy, str)
        replicas = (strategy or {}).get("replicas", [1] * me.ranks)
        strategy = {**(strategy or {}), "split_points": SPLITS[len(replicas)]}
    if bandwidth is not None and me.rank == 0:
        cluster = Cluster.flat(me.ranks, bandwidth).as_json()
        (me.folder / "cluster.json").write_text(json.dumps(cluster))
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **(trainer or {})}
    if slurm:
        settings["plugins"] = [slurm_environment(me)]
    made = L.Trainer(
        accelerator="cpu",
        devices=me.ranks,
        strategy=me.strategy(strategy),
        callbacks=callbacks,
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=me.folder,
        **settings,
    )
    given = {"seed": seed + (me.rank if differ == "data" else 0), **(data or {})}
    if differ in ("length", "empty") and me.rank == 1:
        given["first"] = 16 if differ == "length" else 0
    training = loader(**given)
    others = loader(**{**given, "seed": given["seed"] + 50, "samples": 7, "shuffle": False})
    torch.manual_seed(seed + 7)
    for call in calls:
        if call == "fit":
            path = ckpt_path
            if "fit" in notes.get("calls", ()):
                path, made.fit_loop.max_epochs = None, settings["max_epochs"] + 1
            try:
                made.fit(module, training, others if validation else None, ckpt_path=path)
            finally:
                notes["ended_at"] = made.global_step
        elif call == "predict":
            notes["predictions"] = made.predict(module, others)
        else:
            notes[call] = getattr(made, call)(module, others, ckpt_path=ckpt_path)
        notes.setdefault("calls", []).append(call)
        if call == "fit":
            notes["after_fit"] = numbers(made.callback_metrics)
            notes["logged"] = numbers(made.logged_metrics)
    notes.update(
        watch.notes,
        losses=watch.losses,
        rates=watch.rates,
        listened=watch.listened,
        validated=watch.validated,
        batches=watch.batches,
        batches_seen=[digest(batch) for batch in watch.batches],
        ends=watch.ends,
        initial=watch.initial,
        weights={name: value.clone() for name, value in module.state_dict().items()},
        metrics=numbers(made.callback_metrics),
        epoch=made.current_epoch,
        steps=made.global_step,
        trained=[p.requires_grad for p in module.parameters()],
        counted=[getattr(module, name, None) for name in ("steps", "seen")],
        drawn=torch.rand(1).item(),
        summed=module.total.sum_value if hasattr(module, "total") else None,
    )
    if checkpoint is not None:
        kept: Any = made.checkpoint_callback
        score = None if kept.best_model_score is None else float(kept.best_model_score)
        notes.update(best=score, best_path=kept.best_model_path, last_path=kept.last_model_path)
    if early is not None:
        notes["stopped"] = made.early_stopping_callback.stopped_epoch  # type: ignore[union-attr]
    return notes


def slurm_environment(me: Rank) -> SLURMEnvironment:
    """As srun would start this rank; `scontrol` notes down that it was called."""
    programs = me.folder / f"programs{me.rank}"
    programs.mkdir()
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {me.folder}/scontrol.txt\n')
    (programs / "scontrol").chmod(0o755)
    os.environ.update(
        PATH=f"{programs}:{os.environ['PATH']}",
        SLURM_JOB_ID="77",
        SLURM_NTASKS=str(me.ranks),
        SLURM_NTASKS_PER_NODE=str(me.ranks),
        SLURM_PROCID=str(me.rank),
        SLURM_LOCALID=str(me.rank),
        SLURM_NODEID="0",
        SLURM_NODELIST="localhost",
    )
    return SLURMEnvironment(auto_requeue=True)


def refusals(me: Rank, *, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Runs that are refused, one after the other in the same processes, and then one that works."""
    write_mlp_plan(me)
    for name, options in cases.items():
        given = {"validation": False, "trainer": {"max_epochs": 1}, **options}
        if given.pop("half", False):  # Lightning itself refuses it without a GPU, so the plugin is given
            plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
            given["trainer"] = {"max_epochs": 1, "plugins": [plugin]}
        try:
            fit(Rank(me.rank, me.ranks, me.folder), **given)
            me.notes[name] = None
        except Exception as error:
            me.notes[name] = f"{type(error).__name__}: {error}"
    me.notes["afterwards"] = fit(Rank(me.rank, me.ranks, me.folder), validation=False, trainer={"max_epochs": 1})
    return me.notes


def write_mlp_plan(me: Rank) -> None:
    if me.rank == 0:
        module = make("Mlp")
        batch = next(iter(loader()))
        plan = choose_plan(module, batch, devices=2, split_points=SPLITS[2], device=torch.device("cpu"))
        write_plan(plan, me.folder / "mlp.json")


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"fit": fit, "refusals": refusals}


def task_named(name: str) -> Callable[..., dict[str, Any]]:
    """One of those above, or `module.function`."""
    if name in TASKS:
        return TASKS[name]
    module, _, function = name.rpartition(".")
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found
