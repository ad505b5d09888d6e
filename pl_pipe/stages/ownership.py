"""Which stage owns which module, parameter and buffer. Plan -> *Ownership* -> placement, steps.

A plan names leaf modules. From them follow
  - the home of each parameter and buffer: its module's stage, and the earliest one where several modules share it,
  - the owner of each container: the stage of all its leaves, or none where a cut goes through it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pl_pipe.errors import StageError
from pl_pipe.partition import Plan
from pl_pipe.tensors.ghosts import ModulePlace

_SHOWN = 3


@dataclass(frozen=True)
class Ownership:
    """The stages of a model's leaf modules and of its state, all by qualified name."""

    stages: int
    modules: Mapping[str, int]
    """Leaf modules that the plan names."""
    homes: Mapping[str, int]
    """Every parameter and buffer, under each of its names."""
    ignored: tuple[type[nn.Module], ...] = ()
    """Modules of these classes belong to no stage: they stay as they are on every rank."""

    @classmethod
    def from_plan(cls, model: nn.Module, plan: Plan, *, ignore: Iterable[type[nn.Module]] = ()) -> "Ownership":
        """`model` must be what was profiled: a plan names modules from there."""
        owners: dict[str, int] = {}
        for index, stage in enumerate(plan.stages):
            for name in stage.modules:
                owners.setdefault(name, index)
        return cls.from_mapping(model, owners, stages=len(plan.stages), ignore=ignore)

    @classmethod
    def from_mapping(
        cls,
        model: nn.Module,
        owners: Mapping[str, int],
        *,
        stages: int | None = None,
        ignore: Iterable[type[nn.Module]] = (),
    ) -> "Ownership":
        """`owners` gives each leaf module its stage; a shared parameter may be named too."""
        ignored = tuple(ignore)
        modules = dict(model.named_modules(remove_duplicate=False))
        state = dict(_named_state(model, ignored))
        unknown = [name for name in owners if name not in modules and name not in state]
        if unknown:
            raise StageError(
                f"the plan is for another model: {type(model).__name__} has no {_listed(unknown)}; make a plan from a "
                f"profile of this model"
            )
        count = max(owners.values(), default=-1) + 1 if stages is None else stages
        owned = {name: stage for name, stage in owners.items() if name in modules}
        for stage in range(count):
            if stage not in owned.values():
                raise StageError(f"stage {stage} of {count} owns no module; plan with fewer stages")
        beyond = {name: stage for name, stage in owned.items() if not 0 <= stage < count}
        if beyond:
            name, stage = next(iter(beyond.items()))
            raise StageError(f"module {name} is planned onto stage {stage}, but there are {count} stages")
        nested = [name for name in owned if any(above in owned for above in _above(name))]
        if nested:
            raise StageError(
                f"module {nested[0]} is planned apart from a module that contains it; plan leaf modules only"
            )
        return cls(count, owned, _homes(owned, owners, state, count), ignored)

    def places(self, model: nn.Module, stage: int) -> dict[nn.Module, ModulePlace]:
        """What a rank of `stage` must know of each module; ignored ones, and the parts of leaves, are not in it."""
        found: dict[nn.Module, ModulePlace] = {}
        names = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        parts_of_leaves = {part for name in self.modules for part in model.get_submodule(name).modules()} - {
            model.get_submodule(name) for name in self.modules
        }
        for module, name in names.items():
            if isinstance(module, self.ignored) or module in parts_of_leaves:
                continue
            inside = self._stages_inside(module, name, names)
            state = {self.homes[key] for key, _ in _named_state(module, self.ignored, f"{name}." if name else "")}
            if name in self.modules:
                owner: int | None = self.modules[name]
                whole = (inside | state) == {owner}
            else:
                one = inside | state
                owner = next(iter(one)) if len(one) == 1 and inside else None
                whole = owner is not None
            if owner is None and not inside and not state:
                continue  # no layer of the plan: what it does is single operations
            found[module] = ModulePlace(name, owner, whole, stage in inside | state, name in self.modules)
        return found

    def _stages_inside(self, module: nn.Module, name: str, names: Mapping[nn.Module, str]) -> set[int]:
        """The stages of all leaves in a module, also of those that stand elsewhere under another name."""
        own = {names[part] for part in module.modules()} | {name}
        return {stage for leaf, stage in self.modules.items() if leaf in own}


def _homes(
    owned: Mapping[str, int],
    owners: Mapping[str, int],
    state: Mapping[str, Tensor],
    count: int,
) -> dict[str, int]:
    home_of: dict[int, int] = {}
    for name, tensor in state.items():
        home = min(_owner(name.rpartition(".")[0], owned), owners.get(name, count))
        home_of[id(tensor)] = min(home_of.get(id(tensor), count), home)
    return {name: home_of[id(tensor)] for name, tensor in state.items()}


def _owner(name: str, owned: Mapping[str, int]) -> int:
    """The stage of a leaf, or of the leaf around it, or the first stage among the nearest leaves."""
    for above in (name, *_above(name)):
        if above in owned:
            return owned[above]
        inside = [stage for leaf, stage in owned.items() if not above or leaf.startswith(f"{above}.")]
        if inside:
            return min(inside)
    return 0


def _above(name: str) -> Iterable[str]:
    """`a.b`, `a` and the root for `a.b.c`."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _named_state(
    module: nn.Module, ignored: tuple[type[nn.Module], ...], prefix: str = ""
) -> Iterable[tuple[str, Tensor]]:
    """All parameters and buffers, shared ones under each name, without those of ignored modules."""
    skipped = [name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, ignored)]
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if not any(name.startswith(f"{skip}.") for skip in skipped):
                yield prefix + name, tensor


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"
