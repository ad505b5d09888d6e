"""M modules of one architecture, run as one. modules -> *VariantArray* -> each variant's output, gradients, buffers.

    array = VariantArray([build(seed) for seed in range(8)])
    optimizers = [SGD(module.parameters(), lr) for module, lr in zip(array.variants, rates)]
    outs = array(batch)                              # one forward; outs[j] is what array.variants[j](batch) would give
    sum(loss(out) for out in outs).backward()        # one backward; every module has its own gradients
    for optimizer in optimizers: optimizer.step()

The first variant's module is the one whose Python runs. The idea, and grouped convolutions for it: HFTA, MLSys'21.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from pl_pipe.errors import ConfigError, FusionError
from pl_pipe.fusion.apart import Apart, Slices
from pl_pipe.fusion.checkpoints import Checkpoints
from pl_pipe.fusion.comparing import check_alike
from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import Chooser, Usual
from pl_pipe.fusion.guard import Guards
from pl_pipe.fusion.kept import KeptState
from pl_pipe.fusion.layers import Dropouts, apart_modules, dropouts, watched_modules
from pl_pipe.fusion.report import FusionReport
from pl_pipe.fusion.rules import rules_for
from pl_pipe.fusion.settings import Settings
from pl_pipe.fusion.stacking import StackedBuffer, StackedParameter, new_buffers, stacked_state
from pl_pipe.fusion.values import split, stacked
from pl_pipe.tensors.arrays import ArrayMode, OneStream, Streams, shared
from pl_pipe.tensors.interception import Routes, taken_off
from pl_pipe.tensors.trees import tensors_in

_CALL = "_compiled_call_impl"  # what nn.Module.__call__ asks for first
Module = TypeVar("Module", bound=nn.Module)


class VariantArray(Generic[Module]):
    """Modules that share one forward and one backward; each stays an ordinary module that sees its slices."""

    def __init__(
        self,
        variants: Sequence[Module],
        *,
        fuse_except: Sequence[str] | Mapping[str, str] = (),
        chooser: Chooser | None = None,
        streams: Streams | None = None,
        own: Iterable[str] = (),
        runs: Callable[[], int] = lambda: 0,
    ) -> None:
        """`fuse_except` names modules (also patterns: `layer1.*`) to run once a variant, and may give reasons;
        `streams` says where random numbers come from, `chooser` how operations are computed; attributes named in `own`
        may differ and be read. `runs` counts how often a variant's own Python has run, which may have set something:
        settings are compared anew then."""
        check_alike(variants)
        if isinstance(fuse_except, str):
            raise ConfigError(f"fuse_except is {fuse_except!r}; give a list of names: [{fuse_except!r}]")
        self._variants = list(variants)
        named = fuse_except if isinstance(fuse_except, Mapping) else dict.fromkeys(fuse_except, "fuse_except")
        self._fuse_except = dict(named)
        self.chooser = chooser or Usual()
        self._streams: Streams = streams or OneStream()
        self._own = frozenset(own)
        self._runs = runs
        self._is_running = False
        self._inside_apart = False
        self._stacked: list[StackedParameter | StackedBuffer] = []
        self._kept: KeptState
        self._apart_names: dict[str, str]
        self._compared_at: int | None = None
        self._stack()

    @property
    def variants(self) -> tuple[Module, ...]:
        return tuple(self._variants)

    @property
    def report(self) -> FusionReport:
        """What was fused in the forwards so far, how, and what was not."""
        return self._report

    @property
    def stacked(self) -> tuple[StackedParameter | StackedBuffer, ...]:
        """What owns the variants' parameters and buffers."""
        return tuple(self._stacked)

    @property
    def runs_apart(self) -> bool:
        """Whether a module that runs once a variant is running just now."""
        return self._inside_apart

    def __len__(self) -> int:
        return len(self._variants)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Each variant's output. Tensors among the arguments are shared by all, unless they come from `stack`."""
        if len(self) == 1:
            return [self._alone(*args, **kwargs)]
        return self.split(self.forward(*args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all variants as one value of arrays."""
        with self.fused() as template:
            out = template(*args, **kwargs)
        if not any(shared(tensor) and tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            _refuse_unseen(out)
        return out

    def stack(self, values: Sequence[Any]) -> Any:
        """One value (nested alike) for each variant, as one argument of a call."""
        if len(values) != len(self):
            raise FusionError(f"{len(values)} values are given for {len(self)} variants; give one for each")
        return stacked(values)

    def split(self, out: Any) -> list[Any]:
        """One value of arrays as each variant's own; what all share is handed to each."""
        return split(out, len(self))

    @contextmanager
    def fused(
        self, *, is_recorded: bool = False, chooser: Chooser | None = None, renews: bool = True
    ) -> Iterator[Module]:
        """Within the block the first variant's module computes for all, and tensors are arrays.

        Args:
            is_recorded: what runs will be replayed; it must not write to buffers that are the same for all, which would
                become arrays.
            chooser: in the place of the array's own.
            renews: see `compare`.
        """
        if self._is_running:
            raise FusionError("a fused forward is already running; call the module itself, not the array, inside it")
        self.compare(renews=renews)
        self._follow()
        self._context.is_recorded = is_recorded
        self._context.chooser = chooser or self.chooser
        with self._running():
            yield self._variants[0]

    def keep(self, variants: Sequence[int]) -> None:
        """Only these variants, by number, stay in the array; the others become modules with memory of their own."""
        kept = list(variants)
        if not kept or len(set(kept)) != len(kept) or not set(kept) <= set(range(len(self))):
            raise FusionError(
                f"variants {kept} are to be kept of {len(self)}; give some of 0 to {len(self) - 1}, once each"
            )
        for one in self._stacked:
            one.keep(kept)
        self._streams.keep(kept)
        self._variants = [self._variants[variant] for variant in kept]
        self._stack()

    def release(self) -> tuple[Module, ...]:
        """All variants become modules with memory of their own; the array is empty then."""
        for one in self._stacked:
            one.keep([])
        variants = self.variants
        self._variants, self._stacked = [], []
        return variants

    def state_dict(self, variant: int) -> dict[str, Any]:
        """One variant's state in memory of its own: a file of views would hold the whole array."""
        state = self._variants[variant].state_dict()
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def buffers_kept(self) -> Callable[[], None]:
        """Copies the buffers; what is returned puts them back as they are now."""
        buffers = [one for one in self._stacked if isinstance(one, StackedBuffer)]
        copies = [one.tensor.clone() for one in buffers]

        def put_back() -> None:
            for one, copy in zip(buffers, copies, strict=True):
                one.put(copy)

        return put_back

    @contextmanager
    def taken_apart(self) -> Iterator[None]:
        """Within a fused block: tensors are what they are in memory, variants first."""
        before, self._inside_apart = self._inside_apart, True
        try:
            with taken_off(self._mode):
                yield
        finally:
            self._inside_apart = before

    def renew(self) -> None:
        """Compares the variants' settings anew: only dropout probabilities are asked for at every call."""
        check_alike(self._variants)
        self._stack()

    def compare(self, *, renews: bool = True) -> None:
        """Where a variant's own Python has run meanwhile, compares settings anew.

        Args:
            renews: which modules run once a variant may change; else that is refused.
        """
        if self._compared_at == self._runs():
            return
        self._kept.compare()
        self._settings.compare(self._kept.arrays)
        if self._settings.differing != self._guarded:
            apart = self._apart_of_settings()
            if apart == self._apart_names:
                self._guard()
            elif renews:
                self._prepare(self._kept.arrays)
            else:
                names = ", ".join(sorted({*apart} ^ {*self._apart_names}) or sorted(apart))
                raise FusionError(f"the step itself changes settings of {names}, which then differ between variants")
        self._compared_at = self._runs()  # only now: who is refused here is refused again

    def train(self, mode: bool = True) -> None:
        for variant in self._variants:
            variant.train(mode)

    def eval(self) -> None:
        self.train(False)

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        """One variant needs no arrays: its module runs as it is, at no cost."""
        ((args, kwargs),) = split((args, kwargs), 1)
        with self._streams.turn(0):
            return self._variants[0](*args, **kwargs)

    def _stack(self) -> None:
        self._stacked = stacked_state(self._variants)
        self._settings = Settings(self._variants, self._own)
        self._prepare()

    def _apart_of_settings(self) -> dict[str, str]:
        return apart_modules(self._variants[0], self._fuse_except, self._settings.differing)

    def _guard(self) -> None:
        self._guarded = self._settings.differing
        is_one_leaf = "" in self._apart_names  # which runs once a variant itself
        guarded = {name: those for name, those in self._guarded.items() if name or not is_one_leaf}
        self._guards = Guards(self._variants[0], guarded, lambda: self._inside_apart)

    def _prepare(self, arrays: Collection[tuple[nn.Module, str]] = ()) -> None:
        variants = self._variants
        template = variants[0]
        self._compared_at = None
        self._report = FusionReport({module: name for name, module in template.named_modules() if name})
        self._context = Context(len(variants), streams=self._streams, chooser=self.chooser, report=self._report)
        self._mode = ArrayMode(len(variants), rules=rules_for(self._context), streams=self._streams, notes=self._report)
        self._context.mode = self._mode
        apart = self._apart_names = self._apart_of_settings()
        slices = Slices(self._stacked)
        self._apart = {
            template.get_submodule(name): Apart(name, why, [one.get_submodule(name) for one in variants], slices)
            for name, why in apart.items()
        }
        dropping = dropouts(template)
        self._dropouts = {
            module: Dropouts([one.get_submodule(name) for one in variants]) for module, name in dropping.items()
        }
        self._guard()
        self._checkpoints = Checkpoints(self._running, self._mode, self._streams, is_apart=lambda: self._inside_apart)
        watched = watched_modules(template, apart)
        routed = {**watched, **dropping, **{module: one.name for module, one in self._apart.items()}}
        self._routes = Routes(routed, self._routed)
        self._kept = KeptState(variants, self._apart, self._own, arrays)
        self._modules = [list(variant.modules()) for variant in variants]

    def _follow(self) -> None:
        for one in self._stacked:
            one.follow()
        flags = [[module.training for module in modules] for modules in self._modules]
        for variant, of_one in enumerate(flags):
            if of_one != flags[0]:
                raise FusionError(
                    f"variant {variant} has parts in training mode where variant 0 has them in evaluation mode, or the "
                    "other way round; call train() or eval() of the array"
                )

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._is_running:
            yield
            return
        with ExitStack() as stack:
            self._is_running = True
            stack.callback(setattr, self, "_is_running", False)
            for shown in self._stacked:
                stack.callback(shown.hide)
                shown.show(is_writable=not self._context.is_recorded)
            stack.enter_context(self._kept.shown())
            stack.enter_context(self._guards.standing())
            stack.enter_context(self._routes)
            stack.enter_context(self._calls_routed())
            stack.enter_context(self._checkpoints.routed())
            stack.enter_context(self._mode)
            yield
            for one in self._stacked:
                if isinstance(one, StackedParameter):
                    one.refuse_replaced()
            self._take_new_buffers()

    def _take_new_buffers(self) -> None:
        """Those that the forward has registered: each variant gets its own."""
        with taken_off(self._mode):
            found = new_buffers(self._modules, self._stacked, apart=self._apart)
        if found:
            self._stacked.extend(found)
            for apart in self._apart.values():
                apart.slices = Slices(self._stacked)

    @contextmanager
    def _calls_routed(self) -> Iterator[None]:
        """Modules that run once a variant do so with their hooks."""
        before = [(module, vars(module).get(_CALL)) for module in self._apart]
        for module, apart in self._apart.items():
            vars(module)[_CALL] = partial(self._run_apart, apart, True)
        try:
            yield
        finally:
            for module, call in before:
                if call is None:
                    vars(module).pop(_CALL, None)
                else:
                    vars(module)[_CALL] = call

    def _run_apart(self, apart: Apart, whole: bool, *args: Any, **kwargs: Any) -> Any:
        self._inside_apart = True
        before, self._report.layer = self._report.layer, apart.name
        try:
            with taken_off(self._mode):
                return apart(self._context, args, kwargs, whole=whole)
        finally:
            self._inside_apart = False
            self._report.layer = before

    def _routed(self, module: nn.Module, name: str, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of a watched module's forward."""
        if self._inside_apart:
            return plain(*args, **kwargs)
        apart = self._apart.get(module)
        if apart is not None:
            return self._run_apart(apart, False, *args, **kwargs)
        before, self._report.layer = self._report.layer, name
        try:
            if module in self._dropouts:
                with taken_off(self._mode):
                    return self._dropouts[module](self._context, *args, **kwargs)
            return plain(*args, **kwargs)
        finally:
            self._report.layer = before


def _refuse_unseen(out: Any) -> None:
    for tensor in tensors_in(out):
        if shared(tensor) and tensor.requires_grad:
            raise FusionError(
                "an output depends on parameters but is no array: a scripted function or an extension computed it for "
                "all variants at once; name the module that calls it in fuse_except"
            )
