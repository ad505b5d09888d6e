"""Every variant's own step, in lockstep, with the calls of the model fused. batch -> *LockstepSteps* -> gradients.

For steps that read what differs between variants (label smoothing, a learning rate, numbers). Each variant's Python
runs in a thread of its own, one at a time, until it calls the model; when all have, the model runs once for all:

    variant 0   step ───┐call          ┌─ loss, logs ──┐
    variant 1           └ step ───┐call│               └─ loss, logs
    array                         └────┘ one forward                 └─ one backward
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torchmetrics import Metric, MetricCollection

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from pl_pipe.fusion.comparing import alike
from pl_pipe.fusion.values import split
from pl_pipe.strategies.fusion.settings_guard import SettingsGuard
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall, detached, loss_of, part_gradients
from pl_pipe.strategies.fusion.step_undo import StepUndo, all_metrics, no_host_draws, users_parts
from pl_pipe.tensors.arrays import mark
from pl_pipe.tensors.trees import map_tensors, tensors_in

_CALL = "_compiled_call_impl"  # what nn.Module.__call__ asks for first


class LockstepSteps:
    name = "model array"

    def __init__(self, members: Members, array: VariantArray[L.LightningModule]) -> None:
        self._members = members
        self._array = array
        self._in_array = False
        self._is_new = True
        self._prepare()

    def run(self, call: StepCall) -> list[Any]:
        members = self._members
        self._array.compare()  # now: within the step, modules cannot begin to run once a variant
        is_new, self._is_new = self._is_new, False
        undo = StepUndo(
            members,
            self._array,
            args=call.args,
            metrics=self._metrics,
            parts=self._parts,
            weights=is_new and call.trains,
            gradients=call.adds_to_gradients,
        )
        try:
            if is_new:
                self._parts[0].refuse_iterators()
            with members.log.noting(for_all=False) as notes:
                with self._calls_met(), call.context():  # here too: threads leave theirs in any order
                    outs = self._walk(call, partial(undo.batch.refuse_writes, call.hook, numbers=is_new))
                undo.refuse_draws(call.hook)
                if call.trains:
                    with no_host_draws():
                        self._backward(outs, call)
                    part_gradients(members.modules, call.args)
        except Exception:
            undo()
            if call.clear_gradients is not None:
                call.clear_gradients()
            raise
        with call.context():  # where the steps would have said it
            members.log.say(notes, for_all=False)
        return [detached(out) for out in outs]

    def keep(self, places: Sequence[int]) -> None:  # noqa: ARG002  # the array is kept by who made it
        self._prepare()

    def release(self) -> None: ...

    def _prepare(self) -> None:
        self._parts = users_parts(self._members)
        self._guard = SettingsGuard(self._members.modules, self._members.turns)
        self._metrics = all_metrics(self._members)
        self._walkers: list[_Walker] = []

    def _walk(self, call: StepCall, refuse_writes: Callable[[], None]) -> list[Any]:
        members = self._members
        walkers = [
            _Walker(partial(getattr(module, call.hook), *call.args, **call.kwargs), call.context)
            for module in members.modules
        ]
        self._walkers = walkers
        hosts = [_HostRandom() for _ in walkers]
        answers: list[Any] = [None] * len(walkers)
        try:
            while True:
                for place, walker in enumerate(walkers):
                    with members.turns.turn(place), hosts[place].turn():
                        walker.go_on(answers[place])
                    refuse_writes()
                if all(walker.is_done for walker in walkers):
                    return [walker.out for walker in walkers]
                answers = self._answer(walkers)
        finally:
            for walker in walkers:
                walker.end()
            self._walkers = []

    def _answer(self, walkers: Sequence["_Walker"]) -> list[Any]:
        """One forward for what all variants have called."""
        names = [walker.called for walker in walkers]
        if len(set(names)) > 1:
            raise FusionError(
                f"the variants' steps go different ways: one {_said(names[0])} where another "
                f"{_said(next(name for name in names if name != names[0]))}"
            )
        args, kwargs = _joined([walker.given for walker in walkers])
        with self._array.fused(renews=False) as template, self._guard.standing():
            self._in_array = True
            try:
                module: Any = template.get_submodule(names[0]) if names[0] else template
                out = module._call_impl(*args, **kwargs)
            finally:
                self._in_array = False
        return split(out, len(walkers))

    def _backward(self, outs: Sequence[Any], call: StepCall) -> None:
        losses = [
            (loss, scale) for loss, scale in zip(map(loss_of, outs), call.scales, strict=True) if loss is not None
        ]
        if losses:
            torch.stack([loss * scale for loss, scale in losses]).sum().backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _calls_met(self) -> Iterator[None]:
        """Within the block, calls of the modules and of their parts wait for those of the other variants."""
        before: list[tuple[nn.Module, Any]] = []
        for place, module in enumerate(self._members.modules):
            parts = {"": module, **dict(module.named_children())}
            for name, part in parts.items():
                if not self._is_worth_it(name, part):
                    continue
                before.append((part, vars(part).get(_CALL)))
                vars(part)[_CALL] = partial(self._meet, place, name, part)
        try:
            yield
        finally:
            for part, plain in before:
                vars(part).pop(_CALL, None)
                if plain is not None:
                    vars(part)[_CALL] = plain

    def _is_worth_it(self, name: str, part: nn.Module) -> bool:
        if isinstance(part, Metric | MetricCollection) or name in self._members.fuse_except:
            return False
        return next(part.parameters(), None) is not None and part._compiled_call_impl is None

    def _meet(self, place: int, name: str, part: Any, *args: Any, **kwargs: Any) -> Any:
        """A variant calls a module: it waits here until all have."""
        if self._in_array or self._walkers[place].is_waiting:
            return part._call_impl(*args, **kwargs)
        return self._walkers[place].call(name, (args, kwargs))


class _Left(BaseException):
    """Ends the thread of a step that will not go on; no `except Exception` of the user's holds it."""


class _Walker:
    """A step in a thread of its own, which runs only while `go_on` waits for it."""

    def __init__(self, step: Callable[[], Any], context: Callable[[], Any]) -> None:
        self.out: Any = None
        self.called: str | None = None
        """The module that it waits for; None where it is done."""
        self.given: Any = None
        self.is_waiting = False
        self._error: BaseException | None = None
        self._answer: Any = None
        self._ends = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def walk() -> None:
            self._turn.acquire()
            try:
                if not self._ends:
                    with torch.inference_mode(inference), torch.set_grad_enabled(grad), context():
                        self.out = step()
            except _Left:
                pass
            except BaseException as error:
                self._error = error
            self.called = None
            self._back.release()

        self._thread = threading.Thread(target=walk, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self.called is None

    def go_on(self, answer: Any) -> None:
        """Until the step calls the model again, or ends."""
        self._answer = answer
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def call(self, name: str, given: Any) -> Any:
        """In the thread: waits for the answer."""
        self.called, self.given, self.is_waiting = name, given, True
        self._back.release()
        self._turn.acquire()
        self.is_waiting = False
        if self._ends:
            raise _Left
        answer, self._answer, self.given = self._answer, None, None
        return answer

    def end(self) -> None:
        self._ends = True
        self._turn.release()
        self._thread.join()


class _HostRandom:
    """Python's and NumPy's generators as one variant alone would find them."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def turn(self) -> Iterator[None]:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        yield
        self._python, self._numpy = random.getstate(), np.random.get_state()


def _joined(given: Sequence[Any]) -> Any:
    """The variants' arguments of one call as one: tensors that are the same are shared, others become arrays."""
    leaves = [tree_flatten(one)[0] for one in given]
    for of_all in zip(*leaves, strict=False):
        if not isinstance(of_all[0], Tensor) and not all(alike(of_all[0], other) for other in of_all[1:]):
            raise FusionError(f"the variants call the model with other settings: {of_all[0]!r} and {of_all[1]!r}")
    found = [tensors_in(one) for one in given]
    if len({len(tensors) for tensors in found}) > 1 or len({len(one) for one in leaves}) > 1:
        raise FusionError("the variants call the model with other numbers of arguments")
    together: dict[int, Tensor] = {}
    for of_all in zip(*found, strict=True):
        first = of_all[0]
        if all(_is_same(first, other) for other in of_all[1:]):
            together[id(first)] = first
        elif len({tuple(one.shape) for one in of_all}) > 1:
            raise FusionError(f"the variants call the model with shapes {[list(one.shape) for one in of_all]}")
        else:
            together[id(first)] = mark(torch.stack(of_all))
    return map_tensors(given[0], lambda tensor: together[id(tensor)])


def _is_same(one: Tensor, other: Tensor) -> bool:
    """The same numbers in the same memory."""
    if one is other:
        return True
    return (
        not (one.requires_grad or other.requires_grad)
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _said(name: str | None) -> str:
    return "is over" if name is None else f"calls {name or 'the module itself'}"
