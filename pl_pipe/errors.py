"""What can go wrong for reasons a user can mend.

Every message states the fact, the value found and the remedy: `trainer.devices=8, but this machine has 1 CUDA device;
set trainer.devices=1`. The command line prints such an error as one message without a traceback; anything that is not
one of these is a defect (ours or the model's) and keeps its traceback.
"""


class PlPipeError(Exception):
    """Base of all errors that a user can mend."""


class ConfigError(PlPipeError):
    """A setting that is unknown, out of range, or contradicts another one."""


class DataError(PlPipeError):
    """A data set that is absent, incomplete, or not laid out as it should be."""


class CheckpointError(PlPipeError):
    """A checkpoint that is absent, damaged, or written by another model."""


class GraphError(PlPipeError):
    """A layer graph that is malformed, cyclic, or has impossible costs."""


class RunError(PlPipeError):
    """A run directory, or the processes of a run, not being what a command needs."""


class PlanError(PlPipeError):
    """A plan that cannot be made within its limits, or that does not belong to the model it is used on."""


class StageError(PlPipeError):
    """A model or a step that cannot be divided among stages as planned."""


class ScheduleError(PlPipeError):
    """A schedule whose programs are out of order, wait for each other for ever, or keep too much in flight."""


class ProfileError(PlPipeError):
    """A step that cannot be recorded or timed."""


class LabError(PlPipeError):
    """A lab that this machine cannot set up, or that is not there."""


class FusionError(PlPipeError):
    """Variants that cannot be trained as one array, or a step that does not do the same for all of them."""


OTHER_LIGHTNING = (
    "pytorch_lightning was imported before pl_pipe, and is another copy of Lightning than the one that pl-pipe's "
    "strategies belong to; put `import pl_pipe` above it, or write `import lightning as L` instead"
)


def refuse_other_lightning(part: object) -> None:
    """A Trainer's part of the copy of Lightning that our strategies are no part of."""
    if type(part).__module__.partition(".")[0] in ("pytorch_lightning", "lightning_fabric"):
        raise ConfigError(OTHER_LIGHTNING)
