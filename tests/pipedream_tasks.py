"""What the ranks of a job do: Trainer calls on a small model, and notes of all that came of them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from pipedream_models import loader, make
from torch import Tensor

import pl_pipe  # noqa: F401 - registers the strategies' names
from pl_pipe.partition import write_plan
from pl_pipe.strategies import PipeDreamStrategy
from pl_pipe.strategies.plan_choice import choose_plan

SPLITS = {
    2: ["layers.1"],
    3: ["layers.0", "layers.2"],
    4: ["layers.0", "layers.1", "layers.2"],
}
"""Of an Mlp's four layers, so that its reference knows the stages."""
TIMEOUT_S = 20.0


class Rank:
    """Who runs, and what it notes down."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.notes: dict[str, Any] = {}

    def strategy(self, settings: Mapping[str, Any] | str | None) -> Any:
        """The trainer's; a run with one rank is the plain one unless settings are given."""
        if settings is None and self.ranks == 1:
            return "auto"
        if isinstance(settings, str):
            return settings
        return PipeDreamStrategy(**{"timeout_s": TIMEOUT_S, **(settings or {})})


class Watch(L.Callback):
    """Notes what every callback could see."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.validated: list[dict[str, float]] = []
        self.batches: list[Any] = []
        self.ends: list[int] = []
        """How many batches had been trained with at each validation."""
        self.initial: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.initial = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
        self.notes["names"] = [name for name, _ in module.named_parameters()]
        self.notes["meta"] = [name for name, p in module.named_parameters() if p.is_meta]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append(numbers(trainer.callback_metrics))
        self.ends.append(len(self.batches))

    def on_train_end(self, trainer: Any, module: Any) -> None:
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
        executor = getattr(trainer.strategy, "executor", None)
        if executor is not None:
            self.notes.update(
                peak=executor.versions.peak,
                warmup=executor.settings.warmup,
                drained=executor.is_drained,
                stage=trainer.strategy.divided.stage,
                own=sorted(trainer.strategy.divided.own_parameters()),
            )


def digest(batch: Any) -> float:
    """Tells batches apart, also the order within them."""
    first = batch if torch.is_tensor(batch) else batch[0]
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
    trainer: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    early: Mapping[str, Any] | None = None,
    ckpt_path: str | None = None,
    calls: Sequence[str] = ("fit",),
    differ: str | None = None,
) -> dict[str, Any]:
    """Trainer calls one after the other; `split` cuts an Mlp where the reference expects it."""
    notes = me.notes
    L.seed_everything(seed)
    module = make(model, seed=seed + (me.rank if differ == "weights" else 0), optimizer=optimizer, scheduler=scheduler)
    watch = Watch()
    callbacks: list[Any] = [watch]
    if checkpoint is not None:
        callbacks.append(ModelCheckpoint(me.folder / "kept", **checkpoint))
    if early is not None:
        callbacks.append(EarlyStopping(**early))
    if split and me.ranks > 1:
        assert not isinstance(strategy, str)
        strategy = {**(strategy or {}), "split_points": SPLITS[me.ranks]}
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **(trainer or {})}
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
    training = loader(**given)
    others = loader(**{**given, "seed": given["seed"] + 50, "samples": 7, "shuffle": False})
    torch.manual_seed(seed + 7)
    for call in calls:
        if call == "fit":
            path = ckpt_path
            if "fit" in notes.get("calls", ()):
                path, made.fit_loop.max_epochs = None, settings["max_epochs"] + 1
            made.fit(module, training, others if validation else None, ckpt_path=path)
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
    )
    if checkpoint is not None:
        kept: Any = made.checkpoint_callback
        score = None if kept.best_model_score is None else float(kept.best_model_score)
        notes.update(best=score, best_path=kept.best_model_path, last_path=kept.last_model_path)
    if early is not None:
        notes["stopped"] = made.early_stopping_callback.stopped_epoch  # type: ignore[union-attr]
    return notes


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
        plan = choose_plan(module, batch, stages=2, split_points=SPLITS[2], device=torch.device("cpu"))
        write_plan(plan, me.folder / "mlp.json")


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"fit": fit, "refusals": refusals}


def task_named(name: str) -> Callable[..., dict[str, Any]]:
    """One of those above, or `module.function`."""
    if name in TASKS:
        return TASKS[name]
    module, function = name.split(".")
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found
