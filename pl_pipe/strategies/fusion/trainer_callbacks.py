"""What is asked of the trainer's callbacks before a run. trainer -> *callbacks* -> fused variants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback

from pl_pipe.strategies.fusion.settings import FusionSettings
from pl_pipe.strategies.fusion.variant_names import MAX, MIN, divided


@contextmanager
def callbacks_log_for_themselves(trainer: Any, speaker: L.LightningModule, given: L.LightningModule) -> Iterator[None]:
    """Within the block, what callbacks log is no variant's; Lightning lends them the first module's `log`. Afterwards
    they have the given module's, as Lightning leaves it."""
    plain = partial(type(speaker).log, speaker)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            plain(name, value, *args, **kwargs)

    for callback in trainer.callbacks:
        callback.log, callback.log_dict = plain, log_dict
    try:
        yield
    finally:
        for callback in trainer.callbacks:
            callback.log, callback.log_dict = given.log, given.log_dict


def is_users(callback: L.Callback) -> bool:
    ours = type(callback).__module__.partition(".")[0] in ("lightning", "pl_pipe")
    return not ours or isinstance(callback, LambdaCallback)


def told_modes(trainer: Any, settings: FusionSettings) -> dict[str, str]:
    """For metrics that somebody monitors: whether less or more is better."""
    found: dict[str, str] = {}
    for callback in trainer.callbacks:
        monitor, mode = getattr(callback, "monitor", None), getattr(callback, "mode", None)
        if isinstance(monitor, str) and mode in (MIN, MAX):
            found.setdefault(divided(monitor)[0], mode)
    if settings.monitor is not None and settings.mode is not None:
        found[settings.monitor] = settings.mode
    return found
