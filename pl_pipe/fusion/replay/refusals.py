"""What a step may not do if its operations are to run again without its Python. recording -> *refused* -> error."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pl_pipe.errors import FusionError
from pl_pipe.tensors.lineage import is_strided, version
from pl_pipe.tensors.operations import user_line, user_line_of

_READS: dict[Any, str] = {
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "np.asarray(tensor)",
    Tensor.__dlpack__: "dlpack",
}
"""What takes numbers out of a tensor without an operation; `.item()` and the like are one."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SETTERS = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed")
_MODULES = (torch, torch.random, torch.cuda, torch.cuda.random)


@contextmanager
def refused(state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[None]:
    """Within the block: reading numbers, writing to the batch, drawing elsewhere than where the state is."""
    versions = [_seen(tensor) for tensor in inputs]
    host = torch.get_rng_state()
    try:
        with _NothingUnseen():
            yield
    except NotImplementedError as error:  # a generator as an argument, say
        raise FusionError(f"{user_line_of(error)}: the step cannot be written down: {error}") from error
    except RuntimeError as error:
        if "tracing tensor" not in str(error):
            raise
        raise FusionError(
            f"{user_line_of(error)}: the step reads a number (`.item()`, `if tensor`, or by a function that checks "
            "values, as `F.one_hot` on a CPU), which a replay could not do anew"
        ) from error
    if any(_seen(tensor) != before for tensor, before in zip(inputs, versions, strict=True)):
        raise FusionError("the step writes in place to the batch, which other variants see too")
    device = state[0].device if state else torch.device("cpu")
    if device.type != "cpu" and not torch.equal(host, torch.get_rng_state()):
        raise FusionError(f"the step draws random numbers on the CPU, and its parameters are on {device}")


def _seen(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """By which a change in place shows."""
    return version(tensor), tensor.shape, tensor.stride() if is_strided(tensor) else ()


@contextmanager
def seeding_noted() -> Iterator[list[str]]:
    """Within the block: who sets the state of random numbers, which a replay would not; checkpointing among them."""
    found: list[str] = []
    before = [(module, name, vars(module)[name]) for module in _MODULES for name in _SETTERS if name in vars(module)]
    for module, name, plain in before:
        setattr(module, name, _noting(plain, name, found))
    try:
        yield found
    finally:
        for module, name, plain in before:
            setattr(module, name, plain)


def _noting(plain: Callable[..., Any], name: str, found: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return plain(*args, **kwargs)

    return called


class _NothingUnseen(TorchFunctionMode):
    """Refuses what happens to tensors without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise FusionError(
                f"{user_line()}: the step reads numbers (`{_READS[func]}`), which a replay could not do anew"
            )
        if func == _SET_DATA:
            raise FusionError(
                f"{user_line()}: the step gives a tensor other memory (`.data = …`), which a replay would not"
            )
        return func(*args, **(kwargs or {}))
