"""Starts the ranks as Lightning does, and lets none outlive the others. trainer -> *PipelineLauncher* -> its run.

Lightning kills all ranks when one of its children has died, before they could say why. Here the ranks have time to
notice it themselves and to end with an error; what is left after that is killed. Children end when their parent dies
before the ranks have met; afterwards the lifelines tell them.
"""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from pl_pipe.comm.interruption import interrupt_groups
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.peer_faults import PeerFaults

_PARENT = "PL_PIPE_PARENT"
_LOOK_S = 0.5
_END_S = 10.0  # for ranks to end by themselves, once one has failed


class PipelineLauncher(_SubprocessScriptLauncher):
    """With `explain`, an error that ends a run may be replaced by that of the rank which caused it."""

    def __init__(
        self,
        *args: Any,
        faults: PeerFaults,
        explain: Callable[[BaseException, L.Trainer | None], BaseException],
        spares_others: bool = False,
        check: Callable[[Any], None] | None = None,
    ) -> None:
        """
        Args:
            spares_others: once the ranks have met, a child that dies ends nobody else; the lifelines say if it must.
            check: refuses what a trainer cannot do, before any process is started.
        """
        super().__init__(*args)
        self._spares_others = spares_others
        self._check = check
        self._faults = faults
        self._explain = explain
        self._failed = False
        faults.before_exit = self.kill_children

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Asked in a notebook: ranks beyond the first are started by running the script again."""
        if self.num_processes * self.num_nodes == 1:
            return True
        raise ConfigError(
            f"the strategy starts its {self.num_processes} ranks by running the script again, and a notebook is none; "
            f"save it as one (jupyter nbconvert --to script NOTEBOOK.ipynb) and run that, or set devices=1 here"
        )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if self._check is not None:
            self._check(trainer)
        self._refuse_what_is_in_no_file()
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[_PARENT]
            if self.procs:
                threading.Thread(target=self._observe_children, daemon=True, name="children-observer").start()
        elif _PARENT in os.environ:
            parent = int(os.environ.pop(_PARENT))
            threading.Thread(target=self._observe_parent, args=(parent,), daemon=True, name="parent-observer").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not self._failed:
                self._failed = True
                atexit.register(end_at_exit, self.procs)
            explained = self._explain(error, trainer)
            if explained is error:
                raise
            raise explained from error

    def _refuse_what_is_in_no_file(self) -> None:
        ranks = self.num_processes * self.num_nodes
        starts = ranks > 1 and not self.cluster_environment.creates_processes_externally
        if starts and sys.modules["__main__"].__spec__ is None and not Path(sys.argv[0]).is_file():
            raise ConfigError(
                f"the strategy starts its {ranks} ranks by running the script again, and this code is in no file; save "
                f"it as one and run that, or set devices=1"
            )

    def has_recovered(self) -> None:
        """From the error that is being explained: the ranks go on together, and their scripts end by themselves."""
        self._failed = False
        atexit.unregister(end_at_exit)

    def end_children(self) -> None:
        """After an error: gives them time to say what they know of it, then kills those that are left."""
        _end(self.procs)

    def kill_children(self) -> None:
        _kill(self.procs)

    def _observe_children(self) -> None:
        """The last resort; while the ranks have lifelines these are quicker."""
        while True:
            time.sleep(_LOOK_S)
            codes = [child.poll() for child in self.procs]
            if all(code == 0 for code in codes):
                return
            lifelines = self._faults.lifelines if self._spares_others else None
            if lifelines is not None and lifelines.first is None:
                continue  # the others do without it
            bad = next((rank for rank, code in enumerate(codes, start=1) if code), None)
            if bad is not None:
                break
        deadline_s = time.monotonic() + (self._faults.patience_s + _END_S if self._faults.has_begun else 0.0)
        while True:
            time.sleep(_LOOK_S)
            if self._failed or self._faults.has_ended:
                return  # this rank knows: what it does now is the user's to decide, and at exit its children end
            if time.monotonic() > deadline_s:
                break
        sys.stderr.write(
            f"rank {bad} (process {self.procs[bad - 1].pid}) ended with exit code {codes[bad - 1]}, and this rank did "
            f"not end by itself after that; all ranks are ended now: look at the output above for the reason\n"
        )
        sys.stderr.flush()
        self.kill_children()
        os._exit(1)

    def _observe_parent(self, parent: int) -> None:
        while not self._faults.has_begun:
            if os.getppid() != parent:
                sys.stderr.write("rank 0 ended before the ranks had met; this rank ends too\n")
                sys.stderr.flush()
                os._exit(1)
            time.sleep(_LOOK_S)


def end_at_exit(children: Sequence[subprocess.Popen[Any]]) -> None:
    """Lets a failed run's process end at once, and none of its children stay. It knows of the children alone, since the
    strategy, and with it the model, must not live until then."""
    interrupt_groups()
    _end(children)


def _end(children: Sequence[subprocess.Popen[Any]]) -> None:
    deadline_s = time.monotonic() + _END_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline_s - time.monotonic()))
    _kill(children)


def _kill(children: Sequence[subprocess.Popen[Any]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
