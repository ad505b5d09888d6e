"""What ranks of the farm do with synchronizers: alone, and under Lightning."""

import os
import random
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from hook_models import HOOK_MODELS
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_task import Writes
from pipedream_models import MODELS, loader, make
from pipedream_tasks import SPLITS, Rank
from uneven_models import WholeBatches
from uneven_reference import flat, loss_of, make_model, make_optimizer

from pl_pipe.comm.coordination import Coordinator, CoordinatorClient, StoreMailbox
from pl_pipe.comm.synchronizers import ADPSGD, Exchange, Reunion, Worker
from pl_pipe.strategies import (
    ADPSGDStrategy,
    DataParallelStrategy,
    HetPipeStrategy,
    PartialReduceStrategy,
    PipeDreamStrategy,
    SDPipeStrategy,
)
from pl_pipe.strategies.uneven.rules import make_rule
from pl_pipe.strategies.uneven.settings import UnevenSettings

TIMEOUT_S = 20.0

MODELS.update({model.__name__: model for model in HOOK_MODELS})
STRATEGIES: dict[str, Any] = {
    "partial_reduce": PartialReduceStrategy,
    "ad_psgd": ADPSGDStrategy,
    "hetpipe": HetPipeStrategy,
    "data_parallel": DataParallelStrategy,
    "sdpipe": SDPipeStrategy,
    "pipedream": PipeDreamStrategy,
}


def noted(history: list[Any]) -> Any:
    """Within the block AD-PSGD is made with the list: partners may look at x as soon as it is there."""
    return mock.patch("pl_pipe.strategies.uneven.rules.ADPSGD", partial(ADPSGD, history=history))


def rule(
    me: Rank, *, settings: dict[str, Any], steps: list[int], seed: int = 0, slow: list[float] | None = None
) -> dict[str, Any]:
    """Steps of this rank's own number, with pauses by chance, and the reunion of all."""
    dist.init_process_group("gloo", rank=me.rank, world_size=me.ranks)
    chosen = UnevenSettings(timeout_s=TIMEOUT_S, **settings)
    ranks = tuple(range(me.ranks))
    coordinator = Coordinator(StoreMailbox("run"), {"all": ranks}, rules=chosen.rules, distance=chosen.distance)
    if me.rank == 0:
        coordinator.start()
    client = CoordinatorClient(StoreMailbox("run"), me.rank)
    exchange = Exchange(timeout_s=TIMEOUT_S)
    model = make_model(seed)
    optimizer = make_optimizer(model)
    worker = Worker(me.rank, ranks, dict(model.named_parameters()), client, exchange, TIMEOUT_S)
    history: list[Any] = []
    with noted(history):
        made: Any = make_rule(chosen, worker)
    draw = random.Random(1000 * seed + me.rank)
    pause_s = (slow or [0.001] * me.ranks)[me.rank]
    notes: dict[str, Any] = {"trace": [], "facts": []}
    client.meet()
    made.enter()
    for step in range(steps[me.rank]):
        made.begin_step()
        optimizer.zero_grad()
        loss = loss_of(model, me.rank, step, seed)
        time.sleep(draw.uniform(0.0, 2 * pause_s))
        made.begin_backward()
        loss.backward()
        made.before_update()
        optimizer.step()
        made.after_update()
        notes["trace"].append(flat(model))
        notes["facts"].append(made.facts)
        made.facts = None
    made.leave()
    client.meet()
    made.settle()
    notes["settled"] = flat(model)
    reunion = Reunion(client, exchange)
    reunion.model(dict(model.named_parameters()), {})
    reunion.optimizer(optimizer)
    made.resume()
    client.meet()
    notes.update(
        history=[tuple(event) for event in history],
        united=flat(model),
        momentum=torch.cat([state["momentum_buffer"].reshape(-1) for state in optimizer.state.values()]),
        groups=list(coordinator.groups.kept),
        widest=coordinator.widest,
    )
    made.close()
    client.meet()
    exchange.close()
    if me.rank == 0:
        coordinator.close()
    return notes


class Uneven(L.Callback):
    """Notes what a worker trained on, and makes some workers slow, or end."""

    def __init__(self, me: Rank, slow: Mapping[str, float], strike: Mapping[str, Any] | None, logs: bool) -> None:
        self.me, self.pause_s, self.strike = me, slow.get(str(me.rank), 0.0), strike
        self.logs = logs
        self.batches: list[list[Any]] = []
        self.computed: list[bool] = []
        self.ends: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, float]] = []
        self.history: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.strike and self.strike.get("uniting") and self.strike["rank"] == self.me.rank:
            reunion, how = trainer.strategy.member.reunion, self.strike["how"]
            plain = reunion.optimizer
            reunion.optimizer = lambda optimizer: (self.befall(trainer, how), plain(optimizer))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.batches.append([])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches[-1].append([part.clone() for part in batch])
        self.computed.append(getattr(trainer.strategy, "computes_next_batch", True))
        time.sleep(self.pause_s)
        strike = self.strike
        if strike is None or strike["rank"] != self.me.rank or strike.get("evaluating") or strike.get("uniting"):
            return
        if (trainer.current_epoch, batch_idx) == (strike.get("epoch", 0), strike.get("batch", 1)):
            self.befall(trainer, strike["how"])

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.logs:
            module.log("hooked", float(self.me.rank), on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        strike = self.strike
        if strike and strike.get("evaluating") and strike["rank"] == self.me.rank:
            self.befall(trainer, strike["how"])

    def befall(self, trainer: Any, how: str) -> None:
        if how == "raise":
            raise MemoryError("12 GiB wanted")
        if how == "stop":
            trainer.should_stop = True
        elif how == "save":
            trainer.save_checkpoint(self.me.folder / "within.ckpt")
        elif how == "sleep":
            time.sleep(600)
        else:
            os.kill(os.getpid(), getattr(signal, how))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.ends.append({name: value.clone() for name, value in module.state_dict().items()})


def fit(
    me: Rank,
    *,
    strategy: str = "partial_reduce",
    options: Mapping[str, Any] | None = None,
    model: str = "Mlp",
    seed: int = 0,
    optimizer: str = "momentum",
    scheduler: str | None = None,
    data: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    slow: Mapping[str, float] | None = None,
    strike: Mapping[str, Any] | None = None,
    ckpt_path: str | None = None,
    differ: bool = False,
    calls: int = 1,
    held: int = 7,
    logs: bool = False,
    evaluate: bool = False,
    whole: bool = False,
) -> dict[str, Any]:
    """A Trainer's fit; `slow` workers pause before every batch. `held` samples are evaluated, and the hook after
    each batch of them `logs`. Data that are `whole` come in batches already."""
    notes = me.notes
    L.seed_everything(seed)
    module = make(model if not (differ and me.rank == 1) else "Vae", seed=seed + me.rank, optimizer=optimizer,
                  scheduler=scheduler)  # fmt: skip
    chosen: Any = {"single": "auto"}.get(strategy, strategy)
    if strategy == "sdpipe":
        depth = me.ranks // (options or {}).get("pipelines", 2)
        options = {**({"split_points": SPLITS[depth]} if model == "Mlp" else {}), **(options or {})}
    if strategy in STRATEGIES:
        chosen = STRATEGIES[strategy](**{"timeout_s": TIMEOUT_S, **(options or {})})
    watch = Uneven(me, slow or {}, strike, logs)
    writer = Writes()
    callbacks: list[Any] = [watch, writer]
    if checkpoint is not None:
        callbacks.append(ModelCheckpoint(me.folder / "kept", **checkpoint))
    made = L.Trainer(
        accelerator="cpu", devices=me.ranks, strategy=chosen, callbacks=callbacks, logger=False,
        enable_checkpointing=checkpoint is not None, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=me.folder, **{"max_epochs": 2, "num_sanity_val_steps": 0, **(trainer or {})},
    )  # fmt: skip
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    with noted(watch.history):
        for _ in range(calls):
            if whole:
                made.fit(module, datamodule=WholeBatches(held=held, **(data or {})))
                continue
            made.fit(
                module, loader(**{"seed": seed, **(data or {})}), loader(seed=seed + 50, samples=held, shuffle=False),
                ckpt_path=ckpt_path,
            )  # fmt: skip
    report = getattr(made.strategy, "report", None)
    trained = {name: float(value) for name, value in made.callback_metrics.items()}
    if evaluate:
        held = loader(seed=seed + 50, samples=8, shuffle=False)
        notes["evaluated"] = [made.validate(module, held, verbose=False)[0], made.test(module, held, verbose=False)[0]]
        notes["predicted"] = len(made.predict(module, held))  # type: ignore[arg-type]
        notes["written"] = len(writer.batches)
    notes.update(
        initial=initial,
        batches=watch.batches,
        computed=watch.computed,
        history=[tuple(event) for event in watch.history],
        ends=watch.ends,
        validated=watch.validated,
        metrics=trained,
        weights={name: value.clone() for name, value in module.state_dict().items()},
        steps=made.global_step,
        epoch=made.current_epoch,
        rate=made.optimizers[0].param_groups[0]["lr"],
        samples=getattr(report, "samples", None),
        partners=getattr(report, "partners", None),
        groups=watch_groups.pop("groups", []),
    )
    if checkpoint is not None:
        notes["kept"] = sorted(path.name for path in (me.folder / "kept").glob("*.ckpt"))
    return notes


watch_groups: dict[str, Any] = {}
_plain_close = Coordinator.close


def _noting_close(self: Coordinator) -> None:
    watch_groups["groups"] = list(self.groups.kept)
    _plain_close(self)


Coordinator.close = _noting_close  # type: ignore[method-assign]
