"""Lightning calls hooks of one module; every variant's are meant. Lightning -> *hooks* -> all modules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import _ModuleMode

from pl_pipe.errors import FusionError
from pl_pipe.strategies.fusion.variant_log import VariantLog
from pl_pipe.strategies.fusion.variant_turns import VariantTurns

_STAGES = ("train", "validation", "test", "predict")
PLAIN = (
    *("on_fit_start", "on_fit_end", "setup", "teardown", "configure_model", "on_before_zero_grad"),
    *(f"on_{stage}_{when}" for stage in _STAGES for when in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_start" for stage in _STAGES),
    *("on_validation_model_zero_grad", "on_before_backward", "on_after_backward"),
)
"""Hooks that every variant's module is called with alike."""
WITH_OUTPUT = tuple(f"on_{stage}_batch_end" for stage in _STAGES)
"""Hooks whose first argument is what the variant's own step returned."""
WITH_OPTIMIZER = ("on_before_optimizer_step", "configure_gradient_clipping")
_CLIPPING = "configure_gradient_clipping"
_ALWAYS = (_CLIPPING, "on_validation_model_zero_grad")
_EVAL, _TRAIN = "model_eval", "model_train"
_SKIP_BATCH = -1
_MAY_SKIP = ("on_train_batch_start",)
_LAST_OF_VALIDATION = ("on_validation_epoch_end", "on_validation_end")
_LAST = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown")
"""What a run of a variant's own would still call when it is over."""
_ELSEWHERE = ("on_save_checkpoint", "on_load_checkpoint", "optimizer_zero_grad")
"""Called for each variant where its checkpoint is made or read, and before its step, not when Lightning asks for it."""
_MODES = tuple(f"on_{stage}_{mode}" for stage in ("validation", "test", "predict") for mode in (_EVAL, _TRAIN))
STAND_INS = (*PLAIN, *WITH_OUTPUT, *WITH_OPTIMIZER, *_ELSEWHERE, *_MODES)
"""Attributes that the first module may have instead of its own hooks."""


class VariantHooks:
    """Stands on the first module, in place of its own hooks, until `close`."""

    def __init__(self, modules: Sequence[L.LightningModule], log: VariantLog, turns: VariantTurns) -> None:
        self._all = list(modules)
        self._active = list(range(len(modules)))
        self._log = log
        self._turns = turns
        self._speaker = modules[0]
        self._plain: dict[str, Any] = {}
        self._modes = [_ModuleMode() for _ in modules]
        self.outputs: list[Any] = [None] * len(modules)
        """Of the variants' last step, by their place among all."""
        self.losses: list[Any] = [None] * len(modules)
        self._last: dict[str, int] = {}
        """In which epoch a hook was last called."""
        self._goes_on: Callable[[int], None] | None = None
        """During an evaluation: what puts one of them back into training."""
        self.optimizers: Sequence[Any] = ()
        for name in (*PLAIN, *WITH_OUTPUT, *WITH_OPTIMIZER):
            if name in _ALWAYS or overrides(self._speaker, name):
                self._stand_in(name, self._called_on_all(name))
        for name in _ELSEWHERE:
            self._stand_in(name, _unheard)
        for stage in ("validation", "test", "predict"):
            self._stand_in(f"on_{stage}_{_EVAL}", self._evaluating(f"on_{stage}_{_EVAL}"))
            self._stand_in(f"on_{stage}_{_TRAIN}", self._training(f"on_{stage}_{_TRAIN}"))

    @property
    def active(self) -> list[int]:
        return self._active

    def keep(self, active: Sequence[int]) -> None:
        """Only these places among all are called from now on."""
        self._active = list(active)

    def close(self) -> None:
        for name, plain in self._plain.items():
            vars(self._speaker).pop(name, None)
            if plain is not None:
                vars(self._speaker)[name] = plain
        self._plain.clear()
        self.outputs, self.losses = [None] * len(self._all), [None] * len(self._all)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within the block the first module has hooks of its own only."""
        own = vars(self._speaker)
        stood = {name: own.pop(name) for name in self._plain}
        own.update({name: plain for name, plain in self._plain.items() if plain is not None})
        try:
            yield
        finally:
            own.update(stood)

    def _stand_in(self, name: str, function: Callable[..., Any]) -> None:
        self._plain[name] = vars(self._speaker).get(name)
        vars(self._speaker)[name] = function

    def _called_on_all(self, name: str) -> Callable[..., Any]:
        is_lightnings = not overrides(self._speaker, name)

        @wraps(getattr(type(self._speaker), name))
        def call(*args: Any, **kwargs: Any) -> Any:
            answers = []
            if is_lightnings and name == _CLIPPING and not self._speaker.trainer.gradient_clip_val:
                return None
            if is_lightnings:  # which draws nothing
                for place in self._active:
                    getattr(L.LightningModule, name)(self._all[place], *self._given(name, place, args), **kwargs)
                return None
            with self._turns.streams.joined():
                for turn, place in enumerate(self._active):
                    given = self._given(name, place, args)
                    module = self._all[place]
                    with self._turns.turn(turn):
                        answers.append(getattr(type(module), name)(module, *given, **kwargs))
            if name in (*_LAST, *_LAST_OF_VALIDATION):
                self._last[name] = self._speaker.trainer.current_epoch
            return self._skipped(name, answers)

        vars(call).pop("__wrapped__", None)  # Lightning would look through it, and take the hook for the plain one
        vars(call)["__signature__"] = inspect.signature(getattr(type(self._speaker), name).__get__(self._speaker))
        return call

    def _skipped(self, name: str, answers: Sequence[Any]) -> Any:
        skips = [answer == _SKIP_BATCH for answer in answers]
        if any(skips) and not all(skips) and name in _MAY_SKIP:
            raise FusionError(
                f"{name} of some variants returns -1, to skip the rest of the epoch, and of others it does not; "
                "variants of an array see the same batches: train these with max_array=1"
            )
        return _SKIP_BATCH if any(skips) else None

    def leave(self, places: Sequence[int]) -> dict[int, list[tuple[str, Any]]]:
        """These places among all are trained no further: their last hooks are called. -> What each then logs."""
        logged: dict[int, list[tuple[str, Any]]] = {}
        epoch = self._speaker.trainer.current_epoch
        with self._turns.streams.joined():
            for turn, place in enumerate(self._active):
                if place not in places:
                    continue
                module = self._all[place]
                with self._turns.turn(turn), self._log.noting(for_all=False) as notes:
                    if self._goes_on is not None:
                        self._call_last(module, _LAST_OF_VALIDATION, epoch)
                        self._goes_on(place)
                    self._call_last(module, _LAST, epoch)
                logged[place] = [(note["name"], note["value"]) for _, note in notes]
        return logged

    def _call_last(self, module: L.LightningModule, names: Sequence[str], epoch: int) -> None:
        for name in names:
            if overrides(module, name) and self._last.get(name) != epoch:
                getattr(type(module), name)(module, *(("fit",) if name == "teardown" else ()))

    def _given(self, name: str, place: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in WITH_OUTPUT:
            is_skipped = name == "on_train_batch_end" and args[0] is None  # no batch, no output
            return (None if is_skipped else self.outputs[place], *args[1:])
        if name in WITH_OPTIMIZER:
            return (self.optimizers[place], *args[1:])
        if name == "on_before_zero_grad":
            return (self.optimizers[place],)
        if name == "on_before_backward":
            return (self.losses[place],)
        return args

    def _evaluating(self, name: str) -> Callable[[], None]:
        def evaluate() -> None:
            for one in _LAST_OF_VALIDATION:
                self._last.pop(one, None)
            self._goes_on = partial(self._train, name.replace(_EVAL, _TRAIN))
            for place in self._active:
                module = self._all[place]
                self._modes[place].capture(module)
                if overrides(module, name):
                    self._turns.taken += 1
                    getattr(type(module), name)(module)
                else:
                    module.eval()

        return evaluate

    def _training(self, name: str) -> Callable[[], None]:
        def train() -> None:
            self._goes_on = None
            for place in self._active:
                self._train(name, place)

        return train

    def _train(self, name: str, place: int) -> None:
        module = self._all[place]
        if overrides(module, name):
            self._turns.taken += 1
            getattr(type(module), name)(module)
        else:
            self._modes[place].restore(module)


def overrides(module: L.LightningModule, name: str) -> bool:
    """Whether the module's class has a hook of its own."""
    found = getattr(type(module), name, None)
    return found is not None and found is not getattr(L.LightningModule, name, None)


def _unheard(*_: Any) -> None: ...
