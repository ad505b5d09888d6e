"""What the ranks of a job do with a recipe of the zoo: build it small, train it, note the outcome."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from pipedream_tasks import Rank, Watch

from pl_pipe.recipes.generative.dcgan import Dcgan
from pl_pipe.recipes.generative.drawings import DrawingsData
from pl_pipe.recipes.generative.real_fake import RealFakeClassifier
from pl_pipe.recipes.points.classifier import PointClassifier
from pl_pipe.recipes.points.shapes import ShapesData
from pl_pipe.strategies.native import ddp

SAMPLES = {"num_samples": 26, "num_val_samples": 9, "batch_size": 8}
"""Small enough for a second; the last batch is smaller."""


class Steps(Watch):
    """A step that optimizes by itself has no loss to show: its logs are noted instead."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.automatic_optimization:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        else:
            self.losses.append(float(trainer.callback_metrics["d_loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        executor = getattr(trainer.strategy, "executor", None)
        self.notes["stages"] = None if executor is None else trainer.strategy.divided.plan


def built(
    recipe: str, *, samples: int = SAMPLES["num_samples"], **settings: Any
) -> tuple[L.LightningModule, L.LightningDataModule]:
    sizes = {**SAMPLES, "num_samples": samples}
    if recipe == "pointnet":
        return PointClassifier(num_classes=8, width=0.1, **settings), ShapesData(num_points=24, **sizes)
    kind: Any = {"dcgan_d": RealFakeClassifier, "dcgan": Dcgan}[recipe]
    data = DrawingsData(image_size=16, fakes=recipe == "dcgan_d", **sizes)
    return kind(image_size=16, width=0.1, **settings), data


def fit(
    me: Rank,
    *,
    recipe: str,
    seed: int = 0,
    strategy: Mapping[str, Any] | str | None = None,
    settings: Mapping[str, Any] | None = None,
    epochs: int = 2,
) -> dict[str, Any]:
    """One training; `strategy="ddp"` finds parameters that a step leaves out, as conf/strategy/ddp.yaml would."""
    L.seed_everything(seed)
    module, data = built(recipe, **(settings or {}))
    watch = Steps()
    made: Any = me.strategy(strategy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=me.ranks,
        strategy=ddp(find_unused_parameters=recipe == "dcgan") if made == "ddp" else made,
        max_epochs=epochs,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        logger=False,
        default_root_dir=me.folder,
    )
    torch.manual_seed(seed + 7)
    trainer.fit(module, datamodule=data)
    me.notes.update(
        watch.notes,
        losses=watch.losses,
        initial=watch.initial,
        validated=watch.validated,
        batches=[batch[0].clone() for batch in watch.batches if not batch[0].is_meta],
        targets=[batch[-1].clone() for batch in watch.batches if not batch[0].is_meta],
        weights={name: value.clone() for name, value in module.state_dict().items()},
        finite=all(math.isfinite(loss) for loss in watch.losses),
        images=sorted(path.name for path in (me.folder / "images").glob("*")),
        steps=trainer.global_step,
    )
    return me.notes
