"""A job for the farm: one script with any of Lightning's options, and a diary of everything that could be seen."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hook_models import HOOK_CALLBACKS, HOOK_MODELS
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_models import DATA, LIGHTNING_MODELS
from pipedream_models import MODELS, make
from pipedream_tasks import SPLITS, Rank, Watch, digest, numbers
from torchmetrics import Metric

MODELS.update({model.__name__: model for model in (*LIGHTNING_MODELS, *HOOK_MODELS)})
HOOKS = [name for name in vars(L.Callback) if name.startswith("on_")]


class Diary(Watch):
    """Watches, and writes down every hook with the step at which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[tuple[str, int, int]] = []
        self.segments: list[int] = []
        """Batches before which the pipeline was empty, on all ranks."""
        self.first_rates: list[float] = []
        self.outputs: list[Any] = []
        self.validation_outputs: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        executor = getattr(trainer.strategy, "executor", None)
        if executor is None or executor.begins_anew:
            self.segments.append(len(self.batches))
        self.first_rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        super().on_train_batch_start(trainer, module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.outputs.append(_numbers_in(outputs))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.validation_outputs.append(_numbers_in(outputs))


def _noted(name: str) -> Any:
    plain = getattr(Diary, name)

    def hook(self: Diary, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self.hooks.append((name, trainer.global_step, trainer.current_epoch))
        return plain(self, trainer, *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Diary, _name, _noted(_name))


def _numbers_in(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return {key: _numbers_in(value) for key, value in outputs.items()}
    return outputs.detach().double().sum().item() if torch.is_tensor(outputs) else outputs


class Rows(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, numbers(metrics)))

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class StopsAt(L.Callback):
    """Stops in the middle of an epoch: by the number of the batch, on all ranks or on one."""

    def __init__(self, step: int, rank: int | None = None, hook: str = "on_train_batch_end") -> None:
        self.step, self.rank = step, rank
        vars(self)[hook] = self.perhaps_stop

    def perhaps_stop(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step and self.rank in (None, trainer.global_rank):
            trainer.should_stop = True


class StopsByLoss(L.Callback):
    """Stops as soon as a batch's loss is below a limit: only the last stage knows it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if float(outputs["loss"]) < self.limit:
            trainer.should_stop = True


class Meets(L.Callback):
    """Brings all ranks together after every so many batches, in the middle of a round."""

    def __init__(self, every: int, how: str = "broadcast") -> None:
        self.every, self.how, self.batches = every, how, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches % self.every:
            return
        if self.how == "broadcast":
            assert trainer.strategy.broadcast(self.batches + 100 * trainer.global_rank) == self.batches
        elif self.how == "decide":
            assert trainer.strategy.reduce_boolean_decision(True)
        else:
            trainer.strategy.barrier()


class Slow(L.Callback):
    """Takes its time over every batch, so that training with a time limit has few of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


class SavesByHand(L.Callback):
    """Calls `trainer.save_checkpoint` in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint("by_hand.ckpt")


class Writes(of_lightning.BasePredictionWriter):
    """A file a rank, as Lightning's documentation has it, with what came batch by batch and at the end."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append([list(indices), _numbers_in(prediction)])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        found = {"batches": self.batches, "epoch": [_numbers_in(prediction) for prediction in predictions]}
        (Path(trainer.default_root_dir) / f"predictions_{trainer.global_rank}.json").write_text(json.dumps(found))


class CountsBroadcasts(L.Callback):
    """How often ranks wait for rank 0's word while they train."""

    found = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        strategy, plain = trainer.strategy, trainer.strategy.broadcast

        def broadcast(*args: Any, **kwargs: Any) -> Any:
            self.found += trainer.training
            return plain(*args, **kwargs)

        strategy.broadcast = broadcast

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        vars(trainer.strategy).pop("broadcast", None)


class Summary(of_lightning.ModelSummary):
    """Keeps what it would print."""

    found: Any = None

    def summarize(self, summary_data: Any, total: int, trainable: int, size: float, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.found = {"columns": dict(summary_data), "total": total, "trainable": trainable, "megabytes": size}


OWN: dict[str, Any] = {
    kind.__name__: kind
    for kind in (StopsAt, StopsByLoss, Meets, Slow, SavesByHand, Writes, CountsBroadcasts, Summary, *HOOK_CALLBACKS)
}


def script(
    me: Rank,
    *,
    model: str = "Mlp",
    seed: int = 0,
    optimizer: str = "momentum",
    scheduler: str | None = None,
    data: str = "loader",
    data_options: Mapping[str, Any] | None = None,
    validation: str | None = "loader",
    strategy: Mapping[str, Any] | str | None = None,
    split: bool = False,
    trainer: Mapping[str, Any] | None = None,
    callbacks: Sequence[Sequence[Any]] = (),
    ckpt_path: str | None = None,
    calls: Sequence[str] = ("fit",),
    shuffle: bool = False,
    prepare: Sequence[str] = (),
) -> dict[str, Any]:
    """Trainer calls one after the other; callbacks are given as a name and options."""
    L.seed_everything(seed, verbose=False)
    module = make(model, seed=seed, optimizer=optimizer, scheduler=scheduler)
    me.notes["module"] = module
    diary, rows = Diary(), Rows()
    made_callbacks = [_callback(me, name, dict(options)) for name, options in callbacks]
    if split and me.ranks > 1:
        assert not isinstance(strategy, str)
        replicas = (strategy or {}).get("replicas", [1] * me.ranks)
        strategy = {**(strategy or {}), "split_points": SPLITS[len(replicas)]}
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **(trainer or {})}
    if isinstance(settings.get("max_time"), float):
        settings["max_time"] = timedelta(seconds=settings["max_time"])
    if settings.get("logger") == "graph":
        settings["logger"] = TensorBoardLogger(me.folder, log_graph=True)
    made = L.Trainer(
        accelerator="cpu",
        devices=me.ranks,
        strategy=me.strategy(strategy),
        callbacks=[diary, *made_callbacks],
        enable_checkpointing=any(isinstance(callback, of_lightning.Checkpoint) for callback in made_callbacks),
        **{
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": rows,
            "log_every_n_steps": 1,
            "default_root_dir": me.folder,
            **settings,
        },
    )
    given = DATA[data](seed=seed, **(data_options or {}))
    if shuffle:
        given = DATA[data](seed=seed, shuffle=True, **(data_options or {}))
    others = None if validation is None else DATA[validation](seed=seed + 50, **_short(validation))
    torch.manual_seed(seed + 7)
    me.notes["answers"] = answers = []
    fits = 0
    for call in calls:
        if call == "fit":
            made.fit_loop.max_epochs = (
                settings["max_epochs"] if settings["max_epochs"] is None else (settings["max_epochs"] + fits)
            )
            path = ckpt_path if not fits else None
            fits += 1
            if isinstance(given, L.LightningDataModule):
                made.fit(module, datamodule=given, ckpt_path=path)
            else:
                made.fit(module, given, others, ckpt_path=path)
        else:
            answer = getattr(made, call)(module, others)
            answers.append(json.loads(json.dumps(answer, default=lambda value: value.tolist())))
    me.notes.update(diary.notes, **_seen(diary, rows, made, module))
    for callback in made_callbacks:
        if isinstance(callback, Summary):
            me.notes["summary"] = callback.found
        if isinstance(callback, CountsBroadcasts):
            me.notes["broadcasts"] = callback.found
    return me.notes


def refused(me: Rank, *, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Scripts that are refused, one after the other in the same processes."""
    for name, options in cases.items():
        trial = Rank(me.rank, me.ranks, me.folder)
        try:
            script(trial, **{"validation": None, "trainer": {"max_epochs": 1}, **options})
            me.notes[name] = {"error": "nothing was refused"}
        except Exception as error:
            found = [part.sync_on_compute for part in trial.notes["module"].modules() if isinstance(part, Metric)]
            me.notes[name] = {"error": f"{type(error).__name__}: {error}", "syncs": found}
    return me.notes


def _short(validation: str) -> dict[str, Any]:
    return {"samples": 7} if validation in ("loader", "stream") else {}


def _callback(me: Rank, name: str, options: dict[str, Any]) -> L.Callback:
    if name == "ModelCheckpoint":
        options.setdefault("dirpath", me.folder / "kept")
    if "train_time_interval" in options:
        options["train_time_interval"] = timedelta(seconds=options["train_time_interval"])
    if "scheduling" in options:  # JSON has made texts of its keys
        options["scheduling"] = {int(epoch): factor for epoch, factor in options["scheduling"].items()}
    found: L.Callback = (OWN.get(name) or getattr(of_lightning, name))(**options)
    return found


def _seen(diary: Diary, rows: Rows, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    return {
        "losses": diary.losses,
        "rates": diary.rates,
        "first_rates": diary.first_rates,
        "validated": diary.validated,
        "ends": diary.ends,
        "hooks": diary.hooks,
        "segments": diary.segments,
        "batches": diary.batches,
        "batches_seen": [_digest(batch) for batch in diary.batches],
        "outputs": diary.outputs,
        "validation_outputs": diary.validation_outputs,
        "initial": diary.initial,
        "rows": rows.rows,
        "weights": {name: value.clone() for name, value in module.state_dict().items() if torch.is_tensor(value)},
        "metrics": numbers(trainer.callback_metrics),
        "logged": numbers(trainer.logged_metrics),
        "epoch": trainer.current_epoch,
        "steps": trainer.global_step,
        "trained": [p.requires_grad for p in module.parameters()],
        "syncs": [metric.sync_on_compute for metric in module.modules() if hasattr(metric, "sync_on_compute")],
        "module": {
            name: getattr(module, name) for name in ("counts", "modes", "loaded", "drawn") if hasattr(module, name)
        },
        "training_mode": module.training,
    }


def _digest(batch: Any) -> float:
    return _digest(batch["a"]) + _digest(batch["b"]) if isinstance(batch, Mapping) else digest(batch)
