"""Runs a user's script as it stands, with another strategy than its own. script, strategy -> *runner* -> what it left.

The script knows nothing of it: a Trainer that names no strategy is given one, and dropout drops nothing, because stages
draw their own numbers. What is compared afterwards: the weights of every LightningModule among the script's variables,
variables that begin with `result`, every trainer's metrics, and the checkpoints in the folder.
"""

import contextlib
import copy
import functools
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from pipedream_tasks import Rank
from torch import Tensor
from torch.utils.data import DataLoader

import pl_pipe  # noqa: F401 - with it `pytorch_lightning` is another name of Lightning

_OF_VARIANT = "/variant_0"
_MADE_OF = "made_of"
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 60.0
_OF_VARIANTS = ("fusion", "one variant")
"""Runs that end with the first fit: a script goes on with its one model, and here there are several."""
SEED = 1
"""Of the variant that is compared."""
_fitted: list[tuple[L.Trainer, L.LightningModule]] = []
"""Calls of `fit`."""


class _FirstFitEnded(Exception): ...  # noqa: N818 - no error


def _built_again() -> L.LightningModule:
    """With copies of what the class was given."""
    model = _fitted[-1][1]
    args, kwargs = copy.deepcopy(vars(model)[_MADE_OF])
    return type(model)(*args, **kwargs)


def _strategy(name: str, ranks: int, options: Mapping[str, Any]) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from pl_pipe import strategies

    made: dict[str, Callable[[], Any]] = {
        "plain": lambda: "auto",
        "one variant": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
        "fusion": lambda: strategies.FusionStrategy(**{"seeds": [SEED, SEED + 1], **options}, factory=_built_again),
        "pipeline": lambda: strategies.PipeDreamStrategy(timeout_s=TIMEOUT_S, **options),
        "adaptive": lambda: strategies.AdaptiveCommStrategy(find_unused_parameters=True, timeout_s=TIMEOUT_S),
        "uneven": lambda: strategies.DataParallelStrategy(timeout_s=TIMEOUT_S),
        "default": lambda: strategies.PipeDreamStrategy(timeout_s=TIMEOUT_S),
        "pipedream": lambda: strategies.PipeDreamStrategy(plan="straight", timeout_s=TIMEOUT_S),
        "1f1b": lambda: strategies.PipeDreamStrategy(plan="straight", schedule="1f1b", timeout_s=TIMEOUT_S),
        "whole batches": lambda: strategies.PipeDreamStrategy(
            plan="straight", schedule="1f1b", num_microbatches=1, timeout_s=TIMEOUT_S
        ),
        "gpipe": lambda: strategies.PipeDreamStrategy(plan="straight", schedule="gpipe", timeout_s=TIMEOUT_S),
        "2bw": lambda: strategies.PipeDreamStrategy(plan="straight", schedule="pipedream_2bw", timeout_s=TIMEOUT_S),
        "data parallel": lambda: strategies.PipeDreamStrategy(replicas=[ranks], schedule="1f1b", timeout_s=TIMEOUT_S),
    }
    return made[name]()


@contextlib.contextmanager
def strategy_put_in(
    name: str,
    ranks: int,
    made: list[L.Trainer],
    options: Mapping[str, Any] = MappingProxyType({}),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[None]:
    """Within the block, trainers that name no strategy get this one, with `options`, and `arguments`; all are noted."""
    plain, fit, new = L.Trainer.__init__, L.Trainer.fit, L.LightningModule.__new__

    @functools.wraps(plain)
    def init(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        if kwargs.get("strategy", "auto") == "auto":
            kwargs.update(strategy=_strategy(name, ranks, options), devices=ranks, **arguments)
        kwargs.setdefault("accelerator", "cpu")
        if name in _OF_VARIANTS:  # arrays add up in another order, which Adam makes much of where a gradient is zero
            kwargs.setdefault("precision", "64-true")
        plain(self, *args, **kwargs)

    def noting_arguments(cls: Any, *args: Any, **kwargs: Any) -> Any:
        module = object.__new__(cls)
        vars(module)[_MADE_OF] = copy.deepcopy((args, kwargs))
        return module

    @functools.wraps(fit)
    def noting_fit(self: L.Trainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        is_first = all(model is not fitted for _, fitted in _fitted)
        _fitted.append((self, model))
        if name == "one variant" and is_first:  # as a variant is made
            L.seed_everything(SEED, verbose=False)
            model.load_state_dict(_built_again().state_dict())
        fit(self, model, *args, **kwargs)
        if name in _OF_VARIANTS:
            raise _FirstFitEnded

    loader = DataLoader.__init__

    @functools.wraps(loader)
    def with_generator(self: Any, *args: Any, **kwargs: Any) -> None:
        """Variants of several seeds share their batches; a loader that draws from the process's has one's order."""
        if name in _OF_VARIANTS:
            kwargs.setdefault("generator", torch.Generator().manual_seed(SEED))
        loader(self, *args, **kwargs)

    patched: Any = L.Trainer
    patched.__init__, patched.fit = init, noting_fit
    DataLoader.__init__ = with_generator  # type: ignore[method-assign]
    L.LightningModule.__new__ = noting_arguments  # type: ignore[method-assign]
    try:
        yield
    finally:
        patched.__init__, patched.fit = plain, fit
        DataLoader.__init__ = loader  # type: ignore[method-assign]
        L.LightningModule.__new__ = new  # type: ignore[method-assign]


@contextlib.contextmanager
def nothing_dropped() -> Iterator[None]:
    functional: Any = torch.nn.functional
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    plain = {name: getattr(functional, name) for name in (*names, "scaled_dot_product_attention")}
    attention = plain["scaled_dot_product_attention"]

    def without_dropout(*args: Any, **kwargs: Any) -> Tensor:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})

    for name in names:
        setattr(functional, name, lambda given, *_, **__: given)
    functional.scaled_dot_product_attention = without_dropout
    kinds: dict[Any, str] = {torch.nn.RNNBase: "dropout", torch.nn.modules.dropout._DropoutNd: "p"}
    inits = {kind: kind.__init__ for kind in kinds}

    def without(kind: Any) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            inits[kind](self, *args, **kwargs)
            setattr(self, kinds[kind], 0.0)

        return init

    for kind in kinds:
        kind.__init__ = without(kind)
    try:
        yield
    finally:
        for kind, init in inits.items():
            kind.__init__ = init
        for name, function in plain.items():
            setattr(functional, name, function)


def run(
    me: Rank,
    *,
    script: str,
    strategy: str = "plain",
    options: Mapping[str, Any] = MappingProxyType({}),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """`script` is one of `scripts/` or a path; `options` are the strategy's, `arguments` the Trainer's."""
    path = SCRIPTS / f"{script}.py" if "/" not in script else Path(script)
    trainers: list[L.Trainer] = []
    sys.argv = [str(path)]
    warnings.simplefilter("ignore")
    left: dict[str, Any] = {}
    given = strategy_put_in(strategy, me.ranks, trainers, options, arguments)
    with given, nothing_dropped(), contextlib.suppress(_FirstFitEnded):
        left = runpy.run_path(str(path), run_name="__main__")
    if strategy in _OF_VARIANTS:
        fitting: Any = _fitted[0][0].strategy
        left = {"model": fitting.variants[0] if strategy == "fusion" else _fitted[0][1]}
    me.notes.update(
        weights={
            f"{name}.{key}": value.detach().clone()
            for name, module in left.items()
            if isinstance(module, L.LightningModule)
            for key, value in module.state_dict().items()
            if isinstance(value, Tensor)
        },
        results={name: _plain(value) for name, value in left.items() if name.startswith("result")},
        trainers=[
            {
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                "metrics": _plain(dict(trainer.callback_metrics)),
                "logged": _plain(dict(trainer.logged_metrics)),
            }
            for trainer in trainers
        ],
    )
    if me.rank == 0 and strategy not in _OF_VARIANTS:  # an array's checkpoints hold all its variants
        me.notes["checkpoints"] = {
            str(found.relative_to(me.folder)): _checkpoint(found) for found in sorted(me.folder.rglob("*.ckpt"))
        }
    return me.notes


def _checkpoint(path: Path) -> dict[str, Any]:
    content = torch.load(path, weights_only=False, map_location="cpu")
    return {
        "keys": sorted(content),
        "state_dict": {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)},
        "optimizer_states": _plain(content.get("optimizer_states", [])),
        "step": content["global_step"],
        "epoch": content["epoch"],
    }


def _plain(value: Any) -> Any:
    """Numbers, texts and tensors, in containers of such; of all else the name of its class."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        if any(str(key).endswith(_OF_VARIANT) for key in value):  # and not what is told of all variants together
            value = {str(key).removesuffix(_OF_VARIANT): item for key, item in value.items() if _OF_VARIANT in str(key)}
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def differences(found: Any, expected: Any, where: str = "", *, tolerance: float = 1e-6) -> Iterator[str]:
    """In words, what is not the same; numbers may differ by rounding, relative to the largest of a tensor."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            yield f"{where}: {getattr(found, 'shape', found)} for {tuple(expected.shape)}"
        elif expected.numel() and expected.is_floating_point():
            scale = max(1.0, float(expected.abs().nan_to_num().max()))
            away = float((found.double() - expected.double()).abs().nan_to_num().max()) / scale
            if away > tolerance or not torch.equal(found.isnan(), expected.isnan()):
                yield f"{where}: {away:.2g} away"
        elif not torch.equal(found, expected):
            yield f"{where}: {found} for {expected}" if expected.numel() < 8 else f"{where}: other numbers"
    elif isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            keys = set(found) ^ set(expected) if isinstance(found, dict) else found
            yield f"{where}: {keys} on one side only"
        else:
            for name, value in expected.items():
                yield from differences(found[name], value, f"{where}.{name}", tolerance=tolerance)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f"{where}: {found} for {expected}"
        else:
            for index, value in enumerate(expected):
                yield from differences(found[index], value, f"{where}[{index}]", tolerance=tolerance)
    elif isinstance(expected, float):
        if not isinstance(found, float) or not (
            found == expected
            or abs(found - expected) <= tolerance * max(1.0, abs(expected))
            or found != found != expected
        ):
            yield f"{where}: {found} for {expected}"
    elif found != expected:
        yield f"{where}: {found} for {expected}"


def main() -> None:
    """`python runner.py SCRIPT STRATEGY RANKS …`: tries scripts over a farm, for people."""
    import tempfile

    from pipedream_farm import Farm, Order

    scripts, strategies = sys.argv[1].split(","), sys.argv[2:]
    if scripts == ["all"]:
        scripts = sorted(path.stem for path in SCRIPTS.glob("*.py"))
    farm = Farm(Path(tempfile.mkdtemp()))
    runs = [(name, int(ranks)) for name, ranks in (each.split(":") for each in strategies)]
    orders = {
        (script, *one): Order("ordinary.runner.run", ranks=one[1], script=script, strategy=one[0])
        for script in scripts
        for one in dict.fromkeys(each for run in runs for each in (reference(*run), run))
    }
    for order in orders.values():
        farm.start(order, urgent=False)
    for script in scripts:
        for one in runs:
            expected, job = (farm.start(orders[(script, *each)]) for each in (reference(*one), one))
            sys.stdout.write(f"{script:32} {one[0]}:{one[1]}  {verdict(expected, job)}\n")
            sys.stdout.flush()
    farm.close()


def reference(strategy: str, ranks: int) -> tuple[str, int]:
    """What a run is compared with: Lightning's DDP where each rank loads data of its own, else a single process."""
    if strategy == "fusion":
        return "one variant", 1
    return ("ddp", ranks) if strategy in ("adaptive", "uneven") else ("plain", 1)


def verdict(expected: Any, job: Any) -> str:
    """`equal`, or how a run differs from the one that it is compared with, or what it failed of."""
    known = expected.results
    if "error" in known[0]:
        return f"PLAIN FAILS {known[0]['error']}"
    try:
        found = job.results
    except AssertionError as error:
        return f"NO RESULT {str(error)[-300:]}"
    errors = {rank: one["error"] for rank, one in enumerate(found) if "error" in one}
    if errors:
        return "; ".join(f"rank {rank}: {error[:400]}" for rank, error in errors.items()) + f"   [{job.folder}]"
    lines = []
    for rank, one in enumerate(found):
        names = ("weights", "results", "trainers", "checkpoints") if rank == 0 else ("weights",)
        for name in (name for name in names if name in one):
            lines += [f"rank {rank} {line}" for line in differences(one[name], known[rank % len(known)][name], name)]
    return "equal" if not lines else f"{len(lines)} DIFFERENCES: {'; '.join(lines[:4])}"[:600]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
