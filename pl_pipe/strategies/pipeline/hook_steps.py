"""Hooks of the user's, run on all ranks as if each had the whole model. Lightning's hook -> *this* -> Pipe.hook.

    self.outputs.append(logits)                          in a step: the last stage has numbers, the others have ghosts
    torch.cat(self.outputs).cpu().numpy()                in a hook: every rank gets the numbers, and all go on alike
    for p, q in zip(self.net.parameters(), …): …         computed where the parameters are

The hooks of Lightning's own callbacks run as they are.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, LambdaCallback
from torch import Tensor

from pl_pipe.comm.lifelines import Lifelines
from pl_pipe.errors import StageError
from pl_pipe.strategies.peer_faults import PeerError
from pl_pipe.tensors.ghosts import in_step
from pl_pipe.tensors.operations import user_line

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_LOOPS = ("train", "validation", "test", "predict")
_BETWEEN = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    *(f"on_{loop}_{point}" for loop in _LOOPS for point in ("start", "end", "epoch_start", "epoch_end")),
)
"""With nothing in flight: before these all ranks get what steps have kept."""
_OF_BATCHES = tuple(f"on_{loop}_batch_{point}" for loop in _LOOPS for point in ("start", "end"))
HOOKS = (*_BETWEEN, *_OF_BATCHES)
GIVEN_OUTPUTS = "on_train_batch_end"
_LOOK_S = 0.1
_ON_ITS_WAY_S = 3.0  # a message that a rank has sent before it went on, or began to wait
_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


@contextmanager
def hooks_as_steps(strategy: "PipeDreamStrategy", trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Within the block, those of the module and of the user's callbacks are."""
    others = users_callbacks(trainer)
    owners: list[tuple[Any, type]] = [(module, L.LightningModule)]
    owners += [(callback, L.Callback) for callback in others.values()]
    before: list[tuple[dict[str, Any], str, Any]] = []
    put: dict[int, dict[str, Any]] = {}
    """By callback: what stands among its attributes for a while."""
    for owner, base in owners:
        for name in (*HOOKS, *_WITH_GRADIENTS):
            plain = getattr(owner, name, None)
            if plain is not None and getattr(plain, "__func__", plain) is not getattr(base, name):
                before.append((vars(owner), name, vars(owner).get(name)))
                vars(owner)[name] = _as_step(strategy, plain, name, kept_by=others if name in _BETWEEN else None)
                put.setdefault(id(owner), {})[name] = vars(owner)[name]
        if base is L.Callback and type(owner).state_dict is not L.Callback.state_dict and id(owner) in put:
            before.append((vars(owner), "state_dict", vars(owner).get("state_dict")))
            vars(owner)["state_dict"] = _own_state(owner, owner.state_dict, put[id(owner)])
    try:
        yield
    finally:
        for stored, name, own in before:
            stored.pop(name, None)
            if own is not None:
                stored[name] = own


class HooksEnded:
    """Which hooks the other ranks have been through, by their numbers: one that waits in a hook for a rank that has
    ended it asks for what that one was not asked for."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell, self._name, self._number = tell, "", -1
        self._ended: dict[int, tuple[int, float]] = {}
        """The newest that ranks have ended, and when that was heard."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """Hooks in which ranks wait for all others, and since when."""

    @contextmanager
    def during(self, name: str, number: int) -> Iterator[None]:
        self._name, self._number = name, number
        yield
        self._tell({"hook": number})

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block this rank waits for all others, such as at a barrier."""
        if in_step():
            self._tell({"hook waits": self._number})
        try:
            yield
        finally:
            if in_step():
                self._tell({"hook waits": -1})

    def hear(self, rank: int, note: Any) -> None:
        """By the thread that the notes come to."""
        if isinstance(note, dict) and "hook" in note:
            self._ended[rank] = int(note["hook"]), time.monotonic()
        if isinstance(note, dict) and "hook waits" in note:
            self._waiting[rank] = int(note["hook waits"]), time.monotonic()

    def look(self, rank: int, since_s: float) -> None:
        """By a rank that has waited for another since then."""
        if time.monotonic() - since_s < _ON_ITS_WAY_S:
            return
        before_s = time.monotonic() - _ON_ITS_WAY_S
        waits_in, waits_since_s = self._waiting.get(rank, (-1, 0.0))
        ended, ended_at_s = self._ended.get(rank, (-1, 0.0))
        waits = waits_in == self._number and waits_since_s < before_s
        if waits or (ended >= self._number and ended_at_s < before_s):
            raise StageError(
                f"{user_line()}: {self._name} needs numbers of rank {rank} here, which has gone on without being asked "
                f"for them; look at values of other stages on all ranks, not under is_global_zero or "
                f"rank_zero_only"
            )


class LossesTold:
    """The loss of a batch, for ranks whose step has not come to it: rank 0 tells all, and who looks at it waits."""

    def __init__(self, lifelines: Lifelines, *, device: torch.device, timeout_s: float) -> None:
        self._lifelines, self._device, self._timeout_s = lifelines, device, timeout_s
        self._losses: dict[int, tuple[Tensor, bool]] = {}
        self._come = threading.Condition()

    def tell(self, batch: int, outputs: Mapping[str, Any]) -> None:
        loss, alone = outputs["loss"], len(outputs) == 1
        self._lifelines.send({"batch": batch, "loss": loss.double().item(), "dtype": str(loss.dtype), "alone": alone})

    def hear(self, note: Any) -> None:
        """By the thread that the notes come to."""
        if isinstance(note, dict) and "loss" in note:
            dtype = getattr(torch, note["dtype"].removeprefix("torch."))
            loss = torch.tensor(note["loss"], dtype=dtype, device=self._device)
            with self._come:
                self._losses[note["batch"]] = loss, note["alone"]
                self._come.notify_all()

    def forget(self, *, before: int) -> None:
        with self._come:
            self._losses = {batch: told for batch, told in self._losses.items() if batch >= before}

    def of(self, batch: int) -> tuple[Tensor, bool]:
        """The loss, and whether the step returned nothing else."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._come:
            while batch not in self._losses:
                self._come.wait(_LOOK_S)
                if self._lifelines.first is not None or time.monotonic() > deadline_s:
                    raise PeerError(f"the loss of batch {batch}, which rank 0 tells, did not come")
            return self._losses[batch]


class LossAlone(dict[str, Any]):
    """Stands for what a step returned, on a rank that can be told the loss and nothing else of it."""

    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]
    get, __contains__ = Mapping.get, Mapping.__contains__  # type: ignore[assignment]

    def __init__(self, told: Callable[[], tuple[Tensor, bool]]) -> None:
        super().__init__()
        self._told = told

    def __getitem__(self, key: str) -> Any:
        return self._told()[0] if key == "loss" else self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Tensor]:
        loss, alone = self._told()
        if not alone:
            raise StageError(
                f"{user_line()}: besides the loss, rank 0 alone knows what training_step returned, since other ranks "
                f"have left the step where it reads a value, or take turns in a stage; look at it under "
                f"trainer.is_global_zero, or set schedule=1f1b"
            )
        return {"loss": loss}


def users_callbacks(trainer: L.Trainer) -> dict[str, L.Callback]:
    """By names that are alike on all ranks."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {f"callback {number}": callback for number, callback in enumerate(callbacks) if _is_users(callback)}


def _own_state(callback: L.Callback, plain: Callable[[], Any], put: Mapping[str, Any]) -> Callable[[], Any]:
    """Of a callback that may save all of its attributes: without those that are ours."""

    def state_dict() -> Any:
        attributes = vars(callback)
        ours = {name: attributes.pop(name) for name in (*put, "state_dict") if name in attributes}
        try:
            return plain()
        finally:
            attributes.update(ours)

    return state_dict


def _is_users(callback: L.Callback) -> bool:
    ours = type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "pl_pipe")
    writes = isinstance(callback, BasePredictionWriter)  # on rank 0 alone, which has the predictions
    return not (ours or writes) or isinstance(callback, LambdaCallback)


def _as_step(
    strategy: "PipeDreamStrategy", plain: Callable[..., Any], name: str, *, kept_by: Mapping[str, Any] | None
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def hook(*args: Any, **kwargs: Any) -> Any:
        if in_step():
            return plain(*args, **kwargs)
        with strategy.hook_step(name, kept_by=kept_by, with_gradients=name in _WITH_GRADIENTS):
            if name == GIVEN_OUTPUTS and in_step() and strategy.training is not None:
                *before, _, batch, batch_idx = args
                args = (*before, strategy.training.outputs_for_hook(), batch, batch_idx)
            return plain(*args, **kwargs)

    return hook
