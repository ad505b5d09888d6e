"""Which ends of workers are failures. torchrun's agent -> *restarts* -> started anew, or the end of the run.

torchrun counts every worker that ends with an error, and gives up after `--max-restarts` of them. Here a worker that
asks to be started anew has not failed, nor has one that ends while others wait to join: all would be started anew for
them. The rest counts, so that a run ends at its first failure, however often the number of workers has changed.
"""

from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from pl_pipe.adapt.provisioner import AGAIN


class PatientAgent(LocalElasticAgent):
    """Starts workers anew as often as they ask for it."""

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            asked = all(failure.exitcode == AGAIN for failure in result.failures.values())
            if asked or worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
                self._remaining_restarts += 1  # what torchrun is about to take off
        return result


def use_patient_agent() -> None:
    """In the agent's process: torchrun's launcher has no other place to say so."""
    launcher.LocalElasticAgent = PatientAgent  # type: ignore[attr-defined]
