"""From one number of workers to the next. elastic policy -> *Handover* -> provisioner, torchrun.

Rank 0 asks; all ranks wait to be ended, and look whether those that are too many have gone. What was answered before
rank 0 asked is no answer to it, so every rank notes the latest request before all meet, and rank 0 asks after that:

    rank 0    note 4 │ save │ ask: 5 ──────────────► 5 is answered │ end
    rank 1    note 4 │ save │ 4 is answered: it waits │ … until 5 is │ end
"""

import os
import signal
import time
from pathlib import Path

import lightning as L

from pl_pipe.adapt.provisioner import AGAIN, Provisioner
from pl_pipe.log import get_logger

log = get_logger(__name__)

_LOOK_S = 0.1


class Handover:
    """One rank's side."""

    def __init__(self, provisioner: Provisioner, *, wait_s: float) -> None:
        """
        Args:
            wait_s: after which workers that nobody has ended start anew by themselves.
        """
        self._provisioner, self._wait_s = provisioner, wait_s
        self._is_preparing = False
        self._began_s: float | None = None
        self.is_late = False
        """Those that are to come are not prepared after all that time."""

    def prepare(self, trainer: L.Trainer, number: int) -> None:
        """By rank 0, once: where more workers are to come, they may start while training goes on."""
        if number > trainer.world_size and not self._is_preparing:
            self._is_preparing = True
            self._provisioner.prepare(number)

    def is_prepared(self, trainer: L.Trainer, number: int, *, waits: bool) -> bool:
        """
        Args:
            waits: it is time, and all wait for those that are to come; else training goes on without them for now.
        """
        if number < trainer.world_size:
            return True
        ready = late = False
        if trainer.is_global_zero:
            self.prepare(trainer, number)
            now_s = time.monotonic()
            self._began_s = now_s if self._began_s is None else self._began_s
            deadline_s = now_s + (self._wait_s if waits else 0.0)
            while not (ready := self._provisioner.is_prepared()) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
            late = not ready and now_s > self._began_s + self._wait_s
        ready, self.is_late = trainer.strategy.broadcast((ready, late))
        return ready or waits

    def make(self, trainer: L.Trainer, number: int, path: Path) -> None:
        """Saves, asks, and ends this process: torchrun starts what goes on."""
        latest = self._provisioner.latest()
        if trainer.is_global_zero:
            log.info("step %d: %d -> %d worker(s)", trainer.global_step, trainer.world_size, number)
        trainer.save_checkpoint(path)  # where all ranks meet
        for logger in trainer.loggers:
            logger.save()
        faults = getattr(trainer.strategy, "faults", None)
        if faults is not None:
            trainer.strategy.barrier()
            faults.end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun would wait for one that means to go on
        if trainer.is_global_zero:
            self._provisioner.request(number)
        self._wait(latest, shrinks=number < trainer.world_size)
        os._exit(AGAIN)

    def _wait(self, latest: int, *, shrinks: bool) -> None:
        deadline_s = time.monotonic() + self._wait_s
        while time.monotonic() < deadline_s and not (shrinks and self._provisioner.is_done(after=latest)):
            problem = self._provisioner.problem()
            if problem is not None:
                log.warning("%s; the workers start anew as they were", problem)
                break
            time.sleep(_LOOK_S)
