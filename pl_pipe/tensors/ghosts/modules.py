"""How a module's call is taken: natively, as a ghost, or looked into. step -> *modules* -> learning.

one stage owns it whole    on that stage it runs as ever, with no mode inside; elsewhere it is repeated from memory
a cut goes through it      its parts are called one by one, unless no part of it is this rank's: then from memory too
its weights are elsewhere  (tied, or called back by a later stage) operation by operation, and the weights travel
"""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts.active import THREAD
from pl_pipe.tensors.ghosts.holders import holders_in, structure_of, tensors_of
from pl_pipe.tensors.ghosts.learning import Learner, Learnt, changes, digest, has_hidden_tensors, snapshot
from pl_pipe.tensors.ghosts.specs import TensorSpec, hashable, once_each, scan
from pl_pipe.tensors.ghosts.step import GhostStep
from pl_pipe.tensors.ghosts.values import Value, received, value_of
from pl_pipe.tensors.interception import taken_off
from pl_pipe.tensors.lineage import storage_key, version
from pl_pipe.tensors.operations import user_line
from pl_pipe.tensors.trees import map_tensors, tensors_in

_ATTEMPTS = 3  # at learning a call: some modules set things up in their first ones
_BY_VALUES = object()


@dataclass(frozen=True)
class ModulePlace:
    """Where a module stands in the plan, seen from one rank."""

    name: str
    owner: int | None
    """The stage of a leaf, or of a module whose leaves all belong to one; None where a cut goes through."""
    whole: bool
    """Its parameters and buffers are all on that stage too."""
    is_mine: bool
    """This rank's stage owns it or a part of it."""
    is_leaf: bool = False
    """The plan names it."""


class RoutedForward:
    """Stands in a module's `forward`. Outside steps it is the plain one."""

    def __init__(self, module: nn.Module, place: ModulePlace) -> None:
        self.module = module
        self.place = place
        self.stored: Any = vars(module).get("forward")
        """What stood there as an attribute of the module itself."""
        self.plain: Callable[..., Any] = module.forward
        self._hooks_known, self._is_hooked = -1, False
        self.memory: dict[Any, Any] = {}
        self.attempts: dict[Any, int] = {}
        self.effects: dict[Any, list[tuple[nn.Module, str]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = THREAD.step
        if step is None:
            self._refuse_outside()
            return self.plain(*[received(arg) for arg in args], **{key: received(arg) for key, arg in kwargs.items()})
        return _call(step, self, args, kwargs)

    def _refuse_outside(self) -> None:
        """A backward may call a module again; everybody else outside of steps and hooks wants the whole of it."""
        state = (*self.module.parameters(), *self.module.buffers())
        if torch._C._current_graph_task_id() < 0 and any(tensor.is_meta for tensor in state):
            raise StageError(
                f"{user_line()}: module {self.place.name!r} is called outside of the steps and hooks of the run (in a "
                f"data set?), where no rank has all of it; call it in training_step or a hook such as "
                f"on_train_batch_start, or train with Trainer(strategy='ddp')"
            )

    @property
    def is_hooked_inside(self) -> bool:
        """Whether somebody listens to a part of the module, by hooks that only a call of that part runs."""
        now = RemovableHandle.next_id
        if now != self._hooks_known:
            parts = (part for part in self.module.modules() if part is not self.module)
            self._hooks_known = now
            self._is_hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        return self._is_hooked

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is an ordinary module."""
        twin = memo[id(self.module)]
        return types.MethodType(type(twin).forward, twin)


@dataclass(slots=True)
class _Given:
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    values: list[Value | None]
    structure: Any
    holders: list[Any]
    """Objects among the arguments that hold tensors, which are not exchanged."""

    def key(self, step: GhostStep, module: nn.Module) -> Any:
        """The call's signature; equal ones leave the same behind."""
        specs = [
            (step.spec(tensor, value), None if value is None else (value.home, value.holders))
            for tensor, value in zip(self.tensors, self.values, strict=True)
        ]
        state = (step.stage, step.both_ways, step.model_state, module.training, step.modes)
        key = (state, self.structure, tuple(specs), tuple(self._looks_of(holder) for holder in self.holders))
        return key if hashable(key) else None

    def _looks_of(self, holder: Any) -> Any:
        tensors: list[Tensor] = []
        structure = structure_of(holder, tensors)
        homes = [None if (value := value_of(tensor)) is None else value.home for tensor in tensors]
        return structure, tuple(TensorSpec.of(tensor) for tensor in tensors), tuple(homes)

    def digests(self) -> tuple[Any, ...]:
        """The contents of what every rank has."""
        pairs = zip(self.tensors, self.values, strict=True)
        return tuple(digest(tensor) for tensor, value in pairs if value is None)


def _off(step: GhostStep) -> AbstractContextManager[None]:
    alone = torch._C._len_torch_function_stack() == 1 and torch._C._get_function_stack_at(0) is step
    return _Alone(step) if alone else taken_off(step)


class _Alone(AbstractContextManager[None]):
    """`taken_off`, when the step's mode is the only one."""

    __slots__ = ("_step",)

    def __init__(self, step: GhostStep) -> None:
        self._step = step

    def __enter__(self) -> None:
        torch._C._pop_torch_function_stack()

    def __exit__(self, *_: object) -> None:
        torch._C._push_on_torch_function_stack(self._step)


def _call(step: GhostStep, routed: RoutedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    step.leave_if_done()
    place = routed.place
    is_mine = place.is_mine and step.stage >= 0
    if step.inside is not None or (place.owner is None and (is_mine or step.least is not None)):
        return routed.plain(*args, **kwargs)
    if not place.is_leaf and routed.is_hooked_inside:
        return routed.plain(*args, **kwargs)  # part by part, of which each is where it belongs
    with _off(step):
        holders: list[Any] = []
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            tensors, structure = [args[0]], None  # as most modules are called
        else:
            tensors = []
            structure = scan((args, kwargs), tensors, holders)
        given = _Given(args, kwargs, tensors, [step.value(tensor) for tensor in tensors], structure, holders)
        if place.owner is None:
            key = given.key(step, routed.module)
            learnt = routed.memory.get(key) if key is not None and step.repeats else None
            if learnt is not None:
                return learnt.repeat(step, given.tensors, given.values, given.holders)
        else:
            pairs = [(one, value) for one, value in zip(given.tensors, given.values, strict=True) if value is not None]
            homes = [value.home for one, value in pairs if step.is_drawn_to(one, place.whole)]
            at = max(place.owner, *homes) if homes else place.owner
            if place.whole and at == place.owner:
                return _at_home(step, routed, given, at)
    if place.owner is None:
        return _looked_into(step, routed, given, key)
    before = step.least
    step.least = at if before is None else max(at, before)
    try:
        return routed.plain(*args, **kwargs)
    finally:
        step.least = before


def _at_home(step: GhostStep, routed: RoutedForward, given: _Given, at: int) -> Any:
    """A module of one stage, called with what that stage can have."""
    if not step.batch_is_here and any(map(step.is_absent, given.tensors, given.values)):
        step.need_batch(at, f"module {routed.place.name!r}")
    for tensor, value in zip(given.tensors, given.values, strict=True):
        if value is not None:
            for listener in step.listeners:
                listener.used(value)
            step.move(tensor, value, at)
    return _native(step, routed, given, at) if step.stage == at else _foreign(step, routed, given, at)


def _native(step: GhostStep, routed: RoutedForward, given: _Given, at: int) -> Any:
    """This rank runs it as ever, and tells what came out."""
    step.touch("computed")
    module = routed.module
    real = [step.here(tensor) for tensor in given.tensors]
    versions = [version(tensor) for tensor in real]
    args, kwargs = given.args, given.kwargs
    if any(mine is not shown for mine, shown in zip(real, given.tensors, strict=True)):
        args, kwargs = map_tensors((args, kwargs), step.here)
    key = (step.model_state, module.training, step.modes)
    effects = routed.effects.get(key)
    before = snapshot(module) if effects is None else None
    held = {id(tensor) for holder in given.holders for tensor in tensors_of(holder)}
    THREAD.step = None
    try:
        out = routed.plain(*args, **kwargs)
    except Exception as error:
        _explain_hidden_ghost(step, routed, error)
        raise
    finally:
        THREAD.step = step
    if before is not None:
        effects = routed.effects[key] = changes(module, before)
    for part, attribute in effects or ():
        for tensor in tensors_in(getattr(part, attribute)):
            step.show(tensor, at)
    changed = {id(mine) for mine, old in zip(real, versions, strict=True) if version(mine) != old}
    for shown, mine in zip(given.tensors, real, strict=True):
        if id(mine) in changed:
            step.mutated(shown, at, mine)
    shown_as = {id(mine): shown for shown, mine in zip(given.tensors, real, strict=True)}
    memory: dict[int, Value] = {}
    for shown, mine in zip(given.tensors, real, strict=True):
        value = step.value(shown)
        if value is not None and value.home == at:
            memory[storage_key(mine)] = value

    def told(tensor: Tensor) -> Tensor:
        shown = shown_as.get(id(tensor))
        if shown is not None:
            if id(tensor) in changed or step.value(shown) is None:
                return shown  # changed in place and returned, or of the batch and handed through
            tensor = tensor.view_as(tensor)  # handed through: another value, so another object
        if tensor.is_meta:
            _explain_hidden_ghost(step, routed, None)
            if not step.batch_is_here:
                raise step.batch_needed(f"module {routed.place.name!r}")
        first = memory.get(storage_key(tensor))
        step.show(tensor, at, None if first is None else first.relatives())
        if first is None:
            memory[storage_key(tensor)] = cast(Value, value_of(tensor))
        return tensor

    for holder in (*given.holders, *(() if isinstance(out, Tensor) else holders_in(out))):
        for tensor in tensors_of(holder):
            value = value_of(tensor)
            if id(tensor) not in held and (value is None or value.step is not step):
                step.show(tensor, at)
    if isinstance(out, Tensor):
        return told(out)
    if has_hidden_tensors(out):
        _refuse_object(routed, out)
    return map_tensors(out, once_each(told))


def _foreign(step: GhostStep, routed: RoutedForward, given: _Given, at: int) -> Any:
    """Another rank runs it. Its forward runs here once a signature, for shapes only."""
    key = given.key(step, routed.module)
    learnt = routed.memory.get(key) if key is not None and step.repeats else None
    by_values = learnt is _BY_VALUES
    if by_values:  # shapes follow from numbers of the batch: they belong to the signature
        step.depends_on_values()
        learnt = routed.memory.get((key, given.digests()))
    if learnt is None:
        learner, learnt = _learn_foreign(step, routed, given, at)
        if key is not None and learner.can_repeat:
            if by_values or learner.depends_on_values:
                routed.memory[key] = _BY_VALUES
                key = (key, given.digests())
            routed.memory[key] = learnt
    result: Learnt = learnt
    return result.repeat(step, given.tensors, given.values, given.holders)


def _learn_foreign(step: GhostStep, routed: RoutedForward, given: _Given, at: int) -> tuple[Learner, Learnt]:
    """Runs the module on stand-ins, so that what it changes in place is not the caller's."""
    stand_ins = {
        id(tensor): tensor if value is None else step.new_ghost(step.spec(tensor, value), at)
        for tensor, value in zip(given.tensors, given.values, strict=True)
    }
    private = [stand_ins[id(tensor)] for tensor in given.tensors]
    args, kwargs = map_tensors((given.args, given.kwargs), lambda tensor: stand_ins[id(tensor)])
    values = [step.value(tensor) for tensor in private]
    learner = Learner(step, routed.module, values, holders=given.holders, are_stand_ins=True)
    before, step.inside = step.inside, at
    step.listeners.append(learner)
    try:
        with step.pushed():
            out = routed.plain(*args, **kwargs)
    finally:
        step.listeners.pop()
        step.inside = before
    if has_hidden_tensors(out):
        _refuse_object(routed, out)
    changed = [
        index for index, tensor in enumerate(private) if (value := value_of(tensor)) is not None and value.written
    ]
    return learner, learner.learn(out, private, changed=changed, at=at)


def _looked_into(step: GhostStep, routed: RoutedForward, given: _Given, key: Any) -> Any:
    """A module that a cut goes through, with no part of this rank's: runs part by part until it is known."""
    attempts = routed.attempts.get(key, 0) if key is not None else _ATTEMPTS
    if attempts >= _ATTEMPTS:
        return routed.plain(*given.args, **given.kwargs)
    routed.attempts[key] = attempts + 1
    with _off(step):
        learner = Learner(step, routed.module, given.values, holders=given.holders)
    step.listeners.append(learner)
    try:
        out = routed.plain(*given.args, **given.kwargs)
    finally:
        step.listeners.pop()
    with _off(step):
        learnt = learner.learn(out, given.tensors)
        if learner.can_repeat and not learner.depends_on_values and not has_hidden_tensors(out):
            routed.memory[key] = learnt
    return out


def _explain_hidden_ghost(step: GhostStep, routed: RoutedForward, error: Exception | None) -> None:
    """A module that finds a ghost in an attribute fails in many ways: this is the reason."""
    for part in routed.module.modules():
        for name, attribute in vars(part).items():
            value = value_of(attribute) if isinstance(attribute, Tensor) else None
            if value is not None and value.home != step.stage and attribute.is_meta:
                raise StageError(
                    f"{user_line()}: module {routed.place.name!r} of stage {step.stage} uses its attribute {name!r}, a "
                    f"value of stage {value.home} that was not sent; pass it to the module as an argument"
                ) from error
    if error is not None and not step.batch_is_here and "meta" in str(error):  # through something it keeps
        raise step.batch_needed(f"module {routed.place.name!r}") from error


def _refuse_object(routed: RoutedForward, out: Any) -> None:
    raise StageError(
        f"{user_line()}: module {routed.place.name!r} returns {type(out).__name__}, an object whose tensors cannot be "
        f"exchanged for others; return a tuple, a dict or a dataclass"
    )
