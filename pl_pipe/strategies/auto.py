"""`strategy=auto`: one device, data parallel or a pipeline, as the planner finds it worth. model -> *auto* -> run.

Lightning wants the strategy before it knows the model. So this is a pipeline strategy whose plan is chosen once the
model is there; one stage on one rank, one stage on all of them and several stages are all plans to it.
"""

from typing import Any

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy
from pl_pipe.strategies.pipeline.plan_options import BEST

_CHOSEN = ("plan", "split_points", "replicas")


class AutoStrategy(PipeDreamStrategy):
    """Compares the ways to train the model on these devices, says what they would take, and trains in the best one."""

    def __init__(self, **settings: Any) -> None:
        """
        Args:
            settings: those of PipeDreamStrategy, without `plan`, `split_points` and `replicas`, which divide the model.
        """
        given = [name for name in _CHOSEN if settings.get(name) not in (None, "auto")]
        if given:
            raise ConfigError(
                f"strategy=auto chooses how to divide the model, but {given[0]}={settings[given[0]]} does so too; "
                f"leave it out, or set strategy=pipedream"
            )
        for name in _CHOSEN:
            settings.pop(name, None)
        super().__init__(plan=BEST, **settings)
