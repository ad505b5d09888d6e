"""Values, apart from the tensor objects that show them.

    h = a(x)          one value, home 0
    g = identity(h)   the same numbers, another value: what one rank skips, another may have received
    h.add_(1)         a new value under the old name; its views must be fetched anew

The *home* of a value is the stage that computes it. Tensors that follow from the batch alone have no value: every rank
has them. All ranks run the same Python and keep the same books, so they agree on every transfer without a word.
"""

from typing import Any

from torch import Tensor

_VALUE = "_pl_pipe_value"
_HOME = "_pl_pipe_home"
_EXACT = 1 << 12  # more stages than there will ever be


class Value:
    """One value of one step; two stages that hold it may still show it by different tensors."""

    __slots__ = (
        "_family",
        "born",
        "holders",
        "home",
        "is_parameter",
        "is_state",
        "outdated_by",
        "read_at",
        "real",
        "spec",
        "step",
        "unseen",
        "written",
    )

    def __init__(
        self, step: object, home: int, born: int = 0, *, family: "list[Value] | None" = None, is_state: bool = False
    ) -> None:
        self.step = step
        self.home = home
        self.holders = 1 << home
        """One bit for each stage that holds it, and another, _EXACT higher, where that is more than a rounded copy."""
        self.real: Tensor | None = None
        """What this rank received of it."""
        self.read_at: set[tuple[int, int]] | None = None
        """In a hook, the lines that have read it, each with a stage that it went to."""
        self.born = born
        """The step's count of values when it was made."""
        self.is_state = is_state
        """A parameter or a buffer."""
        self.is_parameter = False
        self.spec: Any = None
        """Remembered while nothing can have changed it."""
        self.written = False
        """Changed in place: an older value stood under the same name."""
        self.outdated_by: int | None = None
        """A later stage changed, on its own copy, memory that this value is a view of."""
        self.unseen: str | None = None
        """A buffer's, assigned after this line had read a value: ranks that had left do not know that it is here."""
        self._family = family
        if family is not None:
            family.append(self)

    def relatives(self) -> "list[Value]":
        """Values that share memory with this one, itself among them."""
        if self._family is None:  # not before it is needed: a list that holds its owner outlives it till a sweep
            self._family = [self]
        return self._family

    @property
    def memory_key(self) -> int:
        """Equal for relatives."""
        return id(self) if self._family is None else id(self._family)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Value":
        """Copies of tensors come with their attributes; a step is not to be copied with them."""
        return self

    def __reduce__(self) -> Any:
        """Tensors that are saved to a file forget it."""
        return _nothing, ()

    def is_held(self, stage: int, *, exact: bool) -> bool:
        holders = self._exact_holders() if exact else self.holders
        return bool(holders >> stage & 1)

    def hand_to(self, stage: int, *, exact: bool) -> None:
        self.holders |= 1 << stage
        if exact:
            self.holders |= 1 << (stage + _EXACT)

    def nearest_holder(self, stage: int, *, exact: bool) -> int:
        """The last stage before `stage` that holds it: what is passed on from stage to stage is sent once a link, and
        its gradient adds up in the order of the single run."""
        holders = self._exact_holders() if exact else self.holders
        return (holders & ((1 << stage) - 1)).bit_length() - 1

    def _exact_holders(self) -> int:
        return self.holders >> _EXACT | 1 << self.home


def _nothing() -> None:
    return None


def value_of(tensor: Tensor) -> Value | None:
    value: Value | None = getattr(tensor, _VALUE, None)
    return value


def show(tensor: Tensor, value: Value) -> Tensor:
    """From now on the tensor object stands for `value`."""
    setattr(tensor, _VALUE, value)
    return tensor


def state_home(tensor: Tensor) -> int | None:
    """The stage that a parameter or buffer lives on; None for all other tensors."""
    home: int | None = getattr(tensor, _HOME, None)
    return home


def home_of(tensor: Tensor) -> int | None:
    """The stage that has the numbers of what a module keeps: where a step assigned it anew, that which computed it."""
    value = value_of(tensor)
    return state_home(tensor) if value is None else value.home


def settle(tensor: Tensor, home: int) -> Tensor:
    """Makes `home` the stage of a parameter, a buffer, or a version of one."""
    setattr(tensor, _HOME, home)
    return tensor


def twin(tensor: Tensor) -> Tensor:
    """A copy that stands for the same value, or for the same parameter or buffer."""
    copied = tensor.detach().clone()
    for name in (_HOME, _VALUE):
        if hasattr(tensor, name):
            setattr(copied, name, getattr(tensor, name))
    return copied


def unsettle(tensor: Tensor) -> None:
    for name in (_HOME, _VALUE):
        if hasattr(tensor, name):
            delattr(tensor, name)


def plain(tensor: Tensor) -> Tensor:
    """The same numbers, of no step; every rank has them, or none but this one will ask."""
    return tensor.detach()


def received(tensor: Any) -> Any:
    """What to compute with on this rank, outside a step: recomputation in backward starts from what was received."""
    value = value_of(tensor) if isinstance(tensor, Tensor) else None
    return tensor if value is None or value.real is None else value.real
