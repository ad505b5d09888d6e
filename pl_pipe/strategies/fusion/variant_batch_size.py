"""An array's batch size, where its variants ask for one. variant -> *batch size* -> whatever makes the batches.

That is a data module, or the model with loaders of its own. A batch size that cannot be told to it is refused: variants
would else be trained with another than the table says.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.fusion.variant_building import BATCH_SIZE, Variant

_LOADERS = "train_dataloaders"


@contextmanager
def batch_size_of(variant: Variant, given: Mapping[str, Any], *, fitting: bool) -> Iterator[None]:
    """Within the block, what the trainer was given makes batches of the variant's size.

    A trained model may be evaluated with any; so an evaluation takes the data as it is where its size cannot be set.
    """
    size = variant.batch_size
    data = next((one for one in given.values() if isinstance(one, L.LightningDataModule)), None)
    if size is None:
        yield
    elif data is not None and (hasattr(data, BATCH_SIZE) or BATCH_SIZE in data.hparams):
        with _changed(data, variant, must=fitting):
            yield
    else:
        if fitting:
            _check(variant, data, given.get(_LOADERS))
        yield


def _check(variant: Variant, data: L.LightningDataModule | None, loaders: Any) -> None:
    asks = f"variant {variant.number} sets batch_size={variant.batch_size}"
    remedy = "give a LightningDataModule with an attribute or hyper-parameter batch_size"
    if data is not None:
        raise ConfigError(f"{asks}, and the data module {type(data).__name__} has no batch_size; {remedy}")
    if loaders is None and variant.is_told_batch_size:
        return  # its own loaders, by its own hyper-parameter
    flat = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
    if any(getattr(loader, BATCH_SIZE, None) != variant.batch_size for loader in flat):
        raise ConfigError(f"{asks}, which a given data loader has fixed; {remedy}")


@contextmanager
def _changed(data: L.LightningDataModule, variant: Variant, *, must: bool) -> Iterator[None]:
    """The attribute may be the class's or a property, so what setting it has stored is taken back, and no more."""
    hyper = data.hparams
    before, stored, saved = getattr(data, BATCH_SIZE, None), dict(vars(data)), hyper.get(BATCH_SIZE)
    new: list[str] = []
    try:
        why = _set(data, variant.batch_size)
        new += [name for name, value in vars(data).items() if name not in stored or stored[name] is not value]
        now = getattr(data, BATCH_SIZE, variant.batch_size)
        if must and now != variant.batch_size:
            raise ConfigError(
                f"variant {variant.number} sets batch_size={variant.batch_size}, and the data module "
                f"{type(data).__name__} stays at {now}{why}; make its batch_size an attribute that can be set, or a "
                "hyper-parameter"
            )
        yield
    finally:
        if BATCH_SIZE in hyper:
            hyper[BATCH_SIZE] = saved
        for name in new:
            if name in stored:
                vars(data)[name] = stored[name]
            else:
                vars(data).pop(name, None)
        if getattr(data, BATCH_SIZE, None) != before:
            setattr(data, BATCH_SIZE, before)


def _set(data: L.LightningDataModule, size: Any) -> str:
    """Why it could not be set, if so."""
    if BATCH_SIZE in data.hparams:
        data.hparams[BATCH_SIZE] = size
    if getattr(data, BATCH_SIZE, size) != size:
        try:
            setattr(data, BATCH_SIZE, size)
        except AttributeError as error:
            return f" ({error})"
    return ""
