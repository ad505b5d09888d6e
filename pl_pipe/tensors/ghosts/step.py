"""One step of a pipelined model, as one rank sees it. user's Python -> *GhostStep* -> exchange.

Every rank runs the whole step. An operation belongs to the last stage among its inputs' homes: there it computes, with
what earlier stages sent; everywhere else it only gives ghosts of the right shape.

    stage 0      h = a(x)  ──send──►  ghost of b(h)                 ghost of the loss
    stage 1      ghost of a(x)        b(h) ──send──►                ghost of the loss
    stage 2      ghost of a(x)        ghost of b(h)   ──receive──►  loss = c(b(h))
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts.active import THREAD, listening
from pl_pipe.tensors.ghosts.books import Books, Exchange, LeaveStep
from pl_pipe.tensors.ghosts.calls import Arguments, Call
from pl_pipe.tensors.ghosts.inference import Inference, OutputSpec
from pl_pipe.tensors.ghosts.kinds import Kind, Operation, operation_of, property_name
from pl_pipe.tensors.ghosts.random_state import CommonRandom
from pl_pipe.tensors.ghosts.specs import TensorSpec, once_each, scan
from pl_pipe.tensors.ghosts.values import Value, unsettle, value_of
from pl_pipe.tensors.interception import put_on, taken_off
from pl_pipe.tensors.lineage import storage_key, version
from pl_pipe.tensors.operations import FREE_OUTPUTS, user_line
from pl_pipe.tensors.trees import map_tensors, tensors_in

_FROM_NUMBERS = ("tensor", "as_tensor", "asarray")  # of a list of tensors they read the numbers
_FOREACH = "_foreach_"
_DATA = Operation("data", Kind.PLAIN, in_place=False)
_SHAPED_ALIKE = ("rand_like", "randn_like")  # of the batch they need no more than its shape


class GhostStep(Books, TorchFunctionMode):
    """The function mode under which the user's Python runs."""

    def __init__(
        self,
        *,
        stage: int,
        stages: int,
        device: torch.device,
        inference: Inference,
        exchange: Exchange,
        seed: int,
        model_state: int = 0,
        batch_is_here: bool = True,
    ) -> None:
        super().__init__(stage=stage, exchange=exchange, batch_is_here=batch_is_here)
        self.stages = stages
        self.device = device
        self.inference = inference
        self._model_state = model_state
        self.look_at_model: Callable[[], int] | None = None
        """Asked for it anew, where the step itself may freeze parameters."""
        self.least: int | None = None
        """Inside a module whose weights have to travel: nothing in it runs on an earlier stage."""
        self.inside: int | None = None
        """Inside a module that another stage runs whole: only shapes matter."""
        self.value_dependent = False
        """Python saw numbers, or a shape followed from numbers: the next batch may take another way."""
        self.seed = seed
        """All ranks have the same, and every step another."""
        self.draws: AbstractContextManager[Any] | None = None
        """Within it, random numbers are the same on all ranks; else they have a stream of the step's own."""
        self.note_free: Callable[[Callable[..., Any] | None, Any, Any], None] | None = None
        """Told of operations on what every rank has, when they have run; None for one that draws numbers."""
        self.run_backward: Callable[..., None] | None = None
        """Where the step's Python may run backward itself: does so, of a loss that is here or None."""
        self.parting: Callable[[str], None] = lambda _: None
        """Told on the ranks that stay: others leave, at this line."""
        self.read: list[Any] = []
        """The numbers that Python saw."""
        self.repeats = True
        """Modules whose results are known are not run for them."""
        self._place = 0
        self._state_changed = False
        self._random = CommonRandom(seed, device)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if THREAD.step is not None:
            raise StageError("a step is begun within another one; end it first")
        self._stack.enter_context(listening())
        THREAD.step = self
        self._place = torch._C._len_torch_function_stack()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            THREAD.step = None
            self._stack.close()
            if not torch.is_grad_enabled():
                self.release()  # no backward will ask for what was received

    def is_drawn_to(self, tensor: Tensor, is_whole: bool) -> bool:
        """Whether a module has to be computed where its argument is, and not where its weights are."""
        return not (self.both_ways and is_whole and (self.gradients_go_back or not tensor.requires_grad))

    @property
    def model_state(self) -> int:
        """Stands for what of the model decides over results: training flags, frozen parameters."""
        if self.look_at_model is not None and self._state_changed:
            self._model_state, self._state_changed = self.look_at_model(), False
        return self._model_state

    def pushed(self) -> AbstractContextManager[None]:
        """The mode is on again, within our own code, below those that were entered after it."""
        return put_on(self, self._place)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation.kind is Kind.LOOK:
            return self._look(func, operation.name, args, kwargs)
        reads_list = operation.name in _FROM_NUMBERS and args and not isinstance(args[0], Tensor)
        if operation.kind is Kind.READ or reads_list:
            return self._read(func, operation, args, kwargs)
        if operation.name.startswith(_FOREACH) and operation.name.endswith("_") and args:
            return self._one_by_one(func, operation, args, kwargs)
        return self.operation(func, operation, (args, kwargs))

    def _one_by_one(
        self, function: Callable[..., Any], operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What changes a list of tensors in place, of several stages perhaps, changes each where it is."""
        method = getattr(Tensor, operation.name.removeprefix(_FOREACH), None)
        if method is None or all(self.value(tensor) is None for tensor in tensors_in((args, kwargs))):
            return self.operation(function, operation, (args, kwargs))
        for place in range(len(args[0])):
            given = [one[place] if isinstance(one, (list, tuple)) else one for one in args]
            named = {name: one[place] if isinstance(one, (list, tuple)) else one for name, one in kwargs.items()}
            self.__torch_function__(method, (), tuple(given), named)
        return None

    def custom_function(
        self, function: type, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with taken_off(self):
            operation = Operation(function.__name__, Kind.PLAIN, in_place=False)
            return self.operation(plain, operation, (args, kwargs), identity=function)

    def is_own(self, function: type) -> bool:
        return function.__module__.startswith("pl_pipe.") and not function.__module__.startswith("pl_pipe.recipes.")

    def operation(
        self, function: Callable[..., Any], operation: Operation, arguments: Arguments, *, identity: Any = None
    ) -> Any:
        """Runs an operation where it belongs."""
        self.leave_if_done()
        tensors: list[Tensor] = []
        structure = scan(arguments, tensors)
        values = [self.value(tensor) for tensor in tensors]
        call = Call(function, operation, arguments, tensors, values, structure, identity or function)
        homes = [value.home for value in values if value is not None]
        if not homes:
            return self._free(call)
        if operation.kind is Kind.GRADIENT and self.run_backward is not None:
            return self._gradients_over_stages(call, max(homes))
        if operation.kind is Kind.GRADIENT and self.is_hook and operation.name == "backward":
            return self._local_backward(call, max(homes))
        if operation.kind is Kind.GRADIENT:
            raise StageError(
                f"{user_line()}: {operation.name} runs inside the step, on values that are spread over stages; return "
                f"the loss instead (automatic optimization), or train without a pipeline"
            )
        for listener in self.listeners:
            for value in values:
                if value is not None:
                    listener.used(value)
        target = self._target(call)
        target_value = None if target is None else self.value(target)
        if self.inside is not None:
            if not self.batch_is_here and any(map(self.is_absent, tensors, values)):
                self.need_batch(self.inside, operation.name)
            return self._ghosts(call, target, self.inside)
        at = max(homes) if self.least is None else max(*homes, self.least)
        if self.both_ways and target_value is not None and (self.gradients_go_back or target_value.is_state):
            at = target_value.home
        absent = not self.batch_is_here and any(map(self.is_absent, tensors, values))
        if absent:
            self.need_batch(at, operation.name)
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                self.move(tensor, value, at, exact=call.is_shaped_by_ghosts)
        if call.is_shaped_by_ghosts:
            if absent:
                raise self.batch_needed(f"the shape of what {operation.name} returns")
            return self._shaped_by_ghosts(call, at)
        return self._compute(call, target, at) if self.stage == at else self._ghosts(call, target, at)

    def _gradients_over_stages(self, call: Call, at: int) -> Any:
        """`loss.backward()`, and `torch.autograd.grad` where all that it goes through is one stage's."""
        assert self.run_backward is not None
        if call.name == "backward":
            (args, kwargs) = call.arguments
            given = dict(zip(("loss", "gradient", "retain_graph", "create_graph", "inputs"), args, strict=False))
            given.update(kwargs)
            if given.get("create_graph") or given.get("inputs") is not None:
                raise StageError(
                    f"{user_line()}: backward with create_graph or inputs, of values that are spread over stages; "
                    f"leave them out, or train on one device"
                )
            loss, gradient = given["loss"], given.get("gradient")
            self.touch("backward")
            self.run_backward(
                self.here(loss) if self.stage == at else None, gradient, retain_graph=bool(given.get("retain_graph"))
            )
            return None
        for tensor, value in zip(call.tensors, call.values, strict=True):
            if value is not None:
                self.move(tensor, value, at)
        if self.stage == at:
            return self._compute(call, None, at)
        (args, kwargs) = call.arguments
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        further = bool(kwargs.get("create_graph"))
        specs = [TensorSpec.of(one) for one in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        return tuple(self.new_ghost(spec._replace(requires_grad=further), at) for spec in specs)

    def _local_backward(self, call: Call, at: int) -> None:
        """In a hook, through what the hook itself has computed: on modules of its own, say."""
        for tensor, value in zip(call.tensors, call.values, strict=True):
            if value is not None:
                self.move(tensor, value, at)
        if self.stage == at:
            args, kwargs = map_tensors(call.arguments, self.here)
            call.function(*args, **kwargs)

    def _ghosts(self, call: Call, target: Tensor | None, at: int) -> Any:
        """Another stage computes: only the books are kept here."""
        if target is not None:
            self.mutated(target, at, None, needs_gradient=call.needs_gradient)
            if call.needs_gradient and target.is_leaf and target.is_floating_point():
                target.requires_grad_()
            return None if call.name == "__setitem__" else target
        if call.is_shaped_by_free_values:
            if any(map(self.is_absent, call.tensors, call.values)):
                raise self.batch_needed(f"the shape of what {call.name} returns")
            self.depends_on_values()
        elif call.is_shaped_by_ghosts:
            raise StageError(
                f"{user_line()}: the shape of what {call.name} returns depends on values that only stage {at} has, "
                f"inside a module that it runs whole; return a tensor of fixed shape (a mask, padded), or move the "
                f'operation out of the module, or train with Trainer(strategy="ddp")'
            )
        specs = [self.spec(tensor, value) for tensor, value in zip(call.tensors, call.values, strict=True)]
        result = self.inference.result(call, specs, self.modes)
        for index in result.changed:
            self.mutated(call.tensors[index], at, None, needs_gradient=call.needs_gradient)

        def ghost(output: OutputSpec) -> Tensor:
            if output.is_argument and output.view_of is not None:
                return call.tensors[output.view_of]
            base = None if output.view_of is None else call.values[output.view_of]
            return self.new_ghost(output.spec, at, base.relatives() if base is not None and base.home == at else None)

        return result.rebuilt(ghost)

    @property
    def modes(self) -> tuple[Any, ...]:
        """What decides over results besides the arguments."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast

    def _target(self, call: Call) -> Tensor | None:
        """The tensor that an operation changes in place, if it does."""
        args, kwargs = call.arguments
        out = kwargs.get("out")
        if out is not None and not isinstance(out, Tensor):
            raise StageError(
                f"{user_line()}: {call.name} with several out= tensors cannot be pipelined; use what it returns"
            )
        if out is not None:
            return out
        if (call.operation.in_place or kwargs.get("inplace") is True) and args and isinstance(args[0], Tensor):
            return args[0]
        return None

    def _free(self, call: Call) -> Any:
        """An operation on what every rank has: every rank runs it."""
        args, kwargs = call.arguments
        if not self.batch_is_here and any(map(self.is_absent, call.tensors, call.values)):
            return self._absent(call)
        if call.operation.kind is Kind.RANDOM:
            out = self._drawn(call, args, kwargs)
            if self.note_free is not None:
                self.note_free(None, call.arguments, out)
            return out
        if call.depends_on_free_values:
            self.depends_on_values()
        out = call.function(*args, **kwargs)
        if self.note_free is not None:
            self.note_free(call.function, call.arguments, out)
        return out

    def _drawn(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:
            return self._random.without_a_trace(call.function, args, kwargs)
        if self.draws is not None:
            with self.draws:
                return call.function(*args, **kwargs)
        self.touch("random")
        return self._random.same_everywhere(call.function, args, kwargs)

    def _absent(self, call: Call) -> Any:
        """The same on a rank that has not the batch: what comes of it is not here either."""
        if self.inside is not None:
            self.need_batch(self.inside, call.name)
        elif call.operation.kind is Kind.RANDOM:
            if call.name not in _SHAPED_ALIKE:
                raise self.batch_needed(call.name)
            args, kwargs = map_tensors(call.arguments, lambda tensor: torch.empty_like(tensor, device=self.device))
            self.touch("random")
            return self._random.same_everywhere(call.function, args, kwargs)
        if call.depends_on_free_values or call.name in FREE_OUTPUTS:
            raise self.batch_needed(f"the shape of what {call.name} returns")
        target = self._target(call)
        if target is not None:
            if not target.is_meta:
                raise self.batch_needed(call.name)
            return None if call.name == "__setitem__" else target
        specs = [TensorSpec.of(tensor) for tensor in call.tensors]
        result = self.inference.result(call, specs, self.modes)
        if any(not call.tensors[index].is_meta for index in result.changed):
            raise self.batch_needed(call.name)

        def outcome(output: OutputSpec) -> Tensor:
            if output.is_argument and output.view_of is not None:
                return call.tensors[output.view_of]
            return output.spec.ghost()

        return result.rebuilt(outcome)

    def _compute(self, call: Call, target: Tensor | None, at: int) -> Any:
        """This is the stage: compute, and note what the results are."""
        self.touch("computed")
        tensors = call.tensors
        real = {id(tensor): self.here(tensor) for tensor in tensors}
        args, kwargs = call.arguments
        if any(real[id(tensor)] is not tensor for tensor in tensors):
            args, kwargs = map_tensors(call.arguments, lambda tensor: real[id(tensor)])
        if self.is_hook and self.others_idle and any(tensor.is_meta for tensor in real.values()):
            raise self.several_ranks()  # another rank of this stage has computed it
        versions = {key: version(tensor) for key, tensor in real.items()}
        out = call.function(*args, **kwargs)
        if target is not None:
            self.mutated(target, at, real[id(target)])
            return target if isinstance(out, Tensor) else out
        given = {id(tensor) for tensor in real.values()}
        changed = {id(real[id(t)]): t for t in tensors if version(real[id(t)]) != versions[id(t)]}
        for tensor in changed.values():
            self.mutated(tensor, at, real[id(tensor)])
        memory = {storage_key(real[id(tensor)]): tensor for tensor in reversed(tensors)}
        free = {id(out[index]) for index in FREE_OUTPUTS.get(call.name, ())}

        def shown(tensor: Tensor) -> Tensor:
            if id(tensor) in free:
                return tensor
            if call.name == "deepcopy":
                unsettle(tensor)  # of a buffer's attributes too
            if id(tensor) in changed:
                return changed[id(tensor)]
            if id(tensor) in given:
                tensor = tensor.view_as(tensor)  # handed on unchanged: another value, so another object
            base = memory.get(storage_key(tensor))
            value = None if base is None else self.value(base)
            return self.show(tensor, at, value.relatives() if value is not None and value.home == at else None)

        return shown(out) if isinstance(out, Tensor) else map_tensors(out, once_each(shown))

    def _shaped_by_ghosts(self, call: Call, at: int) -> Any:
        """The shape of the result is itself a value: later stages compute it too, for its shape; earlier ones leave."""
        for tensor, value in zip(call.tensors, call.values, strict=True):
            if value is not None:
                self._tell_later(tensor, value, at)
        if self.stage == at:
            return self._compute(call, None, at)
        with torch.no_grad():
            args, kwargs = map_tensors(call.arguments, self.here)
            out = call.function(*args, **kwargs)

        def ghost(tensor: Tensor) -> Tensor:
            needs_gradient = call.needs_gradient and tensor.is_floating_point()
            return self.new_ghost(TensorSpec.of(tensor)._replace(requires_grad=needs_gradient), at)

        return map_tensors(out, once_each(ghost))

    # ---- looks and reads

    def _look(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__get__":
            asked = property_name(function)
            placed = asked == "device" or asked in ("is_meta", "is_cuda", "is_cpu")
            if placed and self._is_elsewhere(args[0]):
                return self.device if asked == "device" else asked == f"is_{self.device.type}"
            if asked == "data" and self.value(args[0]) is not None:  # as Parameter's copy asks for
                return self.operation(function, _DATA, (args, kwargs))
        elif name == "__set__" and property_name(function) == "data":
            return self._set_data(function, *args)
        elif name in ("__set__", "requires_grad_"):
            value, self._state_changed = value_of(args[0]), True
            if value is not None:
                value.spec = None
        elif name == "get_device" and self._is_elsewhere(args[0]):
            return -1 if self.device.index is None else self.device.index
        return function(*args, **kwargs)

    def _set_data(self, function: Callable[..., Any], tensor: Tensor, new: Tensor) -> Any:
        """`tensor.data = new`: where the tensor lives, the numbers must be too."""
        value, given = self.value(tensor), self.value(new)
        if value is not None and given is not None:
            self.move(new, given, value.home)
        if value is None:
            return function(tensor, new)
        value.spec = None
        self.touch("data were set")
        real = self.here(new)
        return function(
            tensor, real if real.is_meta == tensor.is_meta else torch.empty_like(real, device=tensor.device)
        )

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """A tensor that is to look as if it were on this rank's device."""
        value = self.value(tensor)
        return value is not None or self.is_absent(tensor, value)

    def _read(
        self, function: Callable[..., Any], operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A value is read: it goes to all later stages, whose Python needs it; the earlier ones have no use for it."""
        tensors = tensors_in((args, kwargs))
        read = [(tensor, value) for tensor in tensors if (value := self.value(tensor)) is not None]
        if operation.name == "__repr__" and read:  # for people: nobody waits for it
            tensor, value = read[0]
            ghost = f"ghost({self.spec(tensor, value)}, stage={value.home})"
            return function(*args, **kwargs) if value.home == self.stage else ghost
        if not self.batch_is_here and any(self.is_absent(tensor, self.value(tensor)) for tensor in tensors):
            if operation.name == "__repr__":
                return function(*args, **kwargs)
            raise self.batch_needed(operation.name)
        self.depends_on_values()
        if read and self.inside is not None:
            raise StageError(
                f"{user_line()}: {operation.name} reads a value inside a module that stage {self.inside} runs whole, "
                f"and other stages need to know what the module returns; move the read out of the module"
            )
        for tensor, value in read:
            if tensor.is_meta and value.home == self.stage and value.real is None:
                raise StageError(
                    f"{user_line()}: {operation.name} reads a value of stage {self.stage} that another of its ranks "
                    f"has computed; give that stage one device, for example by plan=straight"
                )
            self._tell_later(tensor, value, value.home)
        args, kwargs = map_tensors((args, kwargs), self.here)
        found = function(*args, **kwargs)
        if isinstance(found, int | float):
            self.read.append(found)
        return found

    def _tell_later(self, tensor: Tensor, value: Value, at: int) -> None:
        """What follows from the numbers of a value of stage `at`, later stages need them for; earlier ones leave."""
        if self.both_ways and self.stage < 0:
            raise LeaveStep  # a rank that has nothing to do, and to which nothing is sent
        if self.both_ways:
            self.depends_on_values()
            if self.others_idle:
                raise self.several_ranks()
            others = [stage for stage in range(self.stages) if stage != value.home]
        else:
            self._leave_before(at)
            others = list(range(at + 1, self.stages))
        for stage in others:
            self.move(tensor, value, stage, exact=True, to_read=True)

    def _leave_before(self, stage: int) -> None:
        self.depends_on_values()
        self.read_up_to = max(self.read_up_to, stage)
        if self.stage < stage:
            raise LeaveStep
        if stage > 0 or self.others_idle:
            self.parting(user_line())

    def depends_on_values(self) -> None:
        self.value_dependent = True
        self.touch("values")
