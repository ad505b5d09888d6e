"""Logging for all layers: one named logger, and silence for notices that no user of this package can act on."""

import logging
import warnings

# Lightning and torch say these on every run of ours, whatever the user does.
_NOISE = (
    r".*does not have many workers which may be a bottleneck.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The number of training batches .* is smaller than the logging interval.*",
    r".*The dirpath has changed from .*",
    r".*Be aware that when using `ckpt_path`, callbacks used to create the checkpoint.*",
    r".*barrier\(\): using the device under current context.*",
    r".*isinstance\(treespec, LeafSpec\).* is deprecated.*",
    r".*Using `DistributedSampler` with the dataloaders.*",
)
_LIGHTNING = ("lightning", "lightning.fabric", "lightning.pytorch")


class _ChatterFilter(logging.Filter):
    """Drops Lightning's banner and advertisements; keeps everything else it says."""

    _DROPPED = ("tip:", "litlogger", "litmodels", "----------", "distributed_backend=", "all distributed processes")

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("lightning"):
            return True
        message = record.getMessage().lower()
        return not any(word in message for word in self._DROPPED)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def silence_noise() -> None:
    """Hides notices that a user cannot act on. Called by the command line only, never on import."""
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)


def join_lightning() -> None:
    """Lets Lightning's messages go through the same handlers as ours, once each; call it after Lightning's import."""
    for name in _LIGHTNING:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for handler in logging.getLogger().handlers:
        handler.addFilter(_ChatterFilter())
