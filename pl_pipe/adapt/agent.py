"""torchrun whose workers begin warm: `python -m pl_pipe.adapt.agent` takes torchrun's arguments.

torchrun starts workers as new interpreters, which import for most of the time that a change of their number takes. Here
one process a host imports once, and workers are forked off it. An agent that has a place behind those that run waits,
with all of that done, until it is asked for.

    agent ─► fork server: imports torch, lightning, pl_pipe ─┬─ worker of the first round
                                                             └─ worker of the next round, at once
"""

import atexit
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from pl_pipe.adapt.provisioner import AGAIN, PLACE, VARIABLE, FileProvisioner

WARM = ("lightning", "pl_pipe.strategies.adaptive", "pl_pipe.adapt.policies", "pl_pipe.cli.tasks")
"""What workers find imported."""
_LOOK_S = 0.1


def main(arguments: Sequence[str]) -> None:
    """Until the workers have ended for good; their first failure is the exit code 1, as torchrun's."""
    forkserver.set_forkserver_preload(list(WARM))
    forkserver.ensure_running()  # it imports while this process does
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from pl_pipe.adapt.restarts import use_patient_agent

    use_patient_agent()
    options = parse_args(list(arguments))  # type: ignore[no-untyped-call]
    config, _, _ = config_from_args(options)
    config.start_method = "forkserver"
    if PLACE in os.environ:
        _wait_for_request(Path(os.environ[VARIABLE]), int(os.environ[PLACE]))
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    try:
        elastic_launch(config, work)(options.module, options.training_script, options.training_script_args)
    except ChildFailedError as error:
        sys.exit(f"a worker has failed: {error.get_first_failure()[1].message}")
    except RendezvousConnectionError as error:
        sys.exit(f"the other agents cannot be met at {config.rdzv_endpoint}: {error}; start the first one there")


def _wait_for_request(requests: Path, place: int) -> None:
    warm = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    warm.start()
    warm.join()  # the server has imported
    file = FileProvisioner(requests)
    with file.waiting_at(place):
        while not file.wants(place):
            time.sleep(_LOOK_S)


def work(is_module: bool, program: str, arguments: Sequence[str]) -> None:
    """One worker: the program as `python` would run it, in a process that has most of its imports."""
    import numpy

    numpy.random.seed()  # else all that are forked would draw the same
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if type(end) is not SystemExit:  # Lightning's, of one that SIGTERM has ended: it has no code
            sys.exit(128 + signal.SIGTERM)
        if end.code:  # the agent waits for the answer of one that has not failed
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a forked process ends without


def _without_traceback(record: logging.LogRecord) -> bool:
    """Of the agent: what failed is the worker, which has said why; and one that asks to be started anew has not."""
    record.exc_info = None
    return f"(exitcode: {AGAIN})" not in record.getMessage()


if __name__ == "__main__":
    from pl_pipe.adapt.agent import main as agent_main  # by its name, by which workers find it

    agent_main(sys.argv[1:])
