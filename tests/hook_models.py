"""LightningModules and callbacks whose hooks change what an update does: rates, closures, batches, random numbers."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from pipedream_models import FEATURES, OPTIMIZERS, Mlp
from torch import Tensor, nn
from torch.nn import functional as F


class Gathers(Mlp):
    """Gathers over ranks, in the step and between steps, as scripts for several devices do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("gathered", self.all_gather(loss.detach()).mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.all_gather({"logits": self(batch[0]), "labels": batch[1]})
        self.log("val_kept", found["logits"].std())

    def on_train_epoch_end(self) -> None:
        self.log("epochs", self.all_gather(torch.tensor(self.current_epoch + 1.0)).sum())


class RateInHook(Mlp):
    """A warm-up by hand: the rate is set before the update, and stays."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (self.global_step + 1)


class RateInStep(Mlp):
    """The step sets the rate of its own update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


class Cooling(torch.optim.SGD):
    """Changes a setting of its own with every update."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.8
        return found


class OwnRate(Mlp):
    def configure_optimizers(self) -> Any:
        return Cooling(self.parameters(), lr=0.2)


class EverySecond(Mlp):
    """Lightning's guide: an update at every second batch; the other's gradients are cleared before they are used."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ClosureFirst(Mlp):
    """The closure by hand, then the step without it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class AddsUp(Mlp):
    """Accumulates by hand: gradients are cleared after every second batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure) if batch_idx % 2 else optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class AsksInStep(Mlp):
    """The step asks how long training will be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        done = self.global_step / self.trainer.estimated_stepping_batches
        return super().training_step(batch, batch_idx) * (1 + done)


class AsksForAll(Mlp):
    """The step asks for the optimizer, and configuring that asks how long training will be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class AsksInSetup(Mlp):
    """Asks how long training will be before anything is planned."""

    def setup(self, stage: str) -> None:
        self.total = float(self.trainer.estimated_stepping_batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.global_step / self.total)


class AsksLength(Mlp):
    """The rate falls over the length of training, and the step logs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"rate": self.optimizers().param_groups[0]["lr"], "asked": float(self.asked)})
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.parameters())
        self.asked = self.trainer.estimated_stepping_batches
        falling = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=int(self.asked))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


class MixesInStep(Mlp):
    """Mixup with numpy in the step, of a model one of whose layers draws as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Jittered(FEATURES)
        self.drawn: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share, scale = np.random.beta(0.4, 0.4), random.random()
        self.drawn.append((float(share), scale))
        x = share * batch[0] + (1 - share) * batch[0].flip(0)
        logits = self(x) * (1 + scale)
        return share * F.cross_entropy(logits, batch[1]) + (1 - share) * F.cross_entropy(logits, batch[1].flip(0))


class Jittered(nn.Sequential):
    """Draws from Python's generators on the rank that runs it."""

    def __init__(self, features: int) -> None:
        super().__init__(nn.Linear(features, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())


class Mixup(L.Callback):
    """Changes the batch in place before the step, by chance."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        share, order = torch.rand(()), torch.randperm(len(batch[0]))
        vars(module).setdefault("drawn", []).append(float(share))
        batch[0].mul_(share).add_((1 - share) * batch[0].clone()[order] / share.clamp(min=0.1))


HOOK_MODELS: tuple[type[L.LightningModule], ...] = (
    *(Gathers, RateInHook, RateInStep, OwnRate, EverySecond, ClosureFirst, AddsUp, AsksInStep, AsksForAll, MixesInStep),
    *(AsksInSetup, AsksLength),
)
HOOK_CALLBACKS: tuple[type[L.Callback], ...] = (Mixup,)
