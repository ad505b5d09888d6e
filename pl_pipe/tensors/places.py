"""Puts a tensor where a module keeps a parameter or a buffer."""

from torch import Tensor, nn

_FLAT, _FLAT_NAMES = "_flat_weights", "_flat_weights_names"


def put_parameter(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Also in the list of weights that recurrent modules keep besides."""
    module._parameters[attribute] = tensor  # type: ignore[assignment]
    flat = vars(module).get(_FLAT)
    if flat is not None:
        names = vars(module)[_FLAT_NAMES]
        if attribute in names:
            flat[names.index(attribute)] = tensor
