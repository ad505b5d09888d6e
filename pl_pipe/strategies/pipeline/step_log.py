"""What a step logs, on the rank that reports. training_step -> *StepLog* -> Lightning.

All ranks run the user's step, and only the last stage has its results. There `self.log` is heard during the step and
answered after it, once for all micro-batches of a batch. The other ranks log nothing: they are told the metrics when
the pipeline is drained. Where the last stage has replicas, each sends the records of its own steps to rank 0.
"""

import functools
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm import ObjectChannel
from pl_pipe.errors import StageError
from pl_pipe.runtime.micro_batches import REDUCTIONS, mean_of
from pl_pipe.strategies.pipeline.metric_calls import MetricCall, MetricCalls
from pl_pipe.tensors.operations import user_line
from pl_pipe.tensors.trees import map_tensors

_LINE = "user's line"


@dataclass
class StepRecord:
    """One mini-batch's step, as people see it."""

    share: float
    """Of its batch."""
    logged: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of `self.log`."""
    metric_calls: list[MetricCall] = field(default_factory=list)
    output: Any = None
    """What the step returned; None where the rank left it early."""


class StepLog:
    """Stands in for `LightningModule.log`, which `log_dict` and modules' own `log` call too."""

    def __init__(self, module: L.LightningModule, *, reports: bool, is_last_stage: bool) -> None:
        self.records: list[StepRecord] = []
        """Of the batch whose steps are running, one a mini-batch."""
        self.metrics = MetricCalls(module, reports=reports)
        self._module = module
        self._reports = reports
        self._is_last_stage = is_last_stage
        bases: Any = type(module).__mro__
        self._class = next(base for base in bases if base.__name__ == "LightningModule")
        self._plain = vars(self._class)["log"]
        self._signature = inspect.signature(self._plain)
        self._step: Any = None
        self._hook: Any = None
        self._record = StepRecord(1.0)

        def log(logging: Any, *args: Any, **kwargs: Any) -> Any:
            hear = self._hear if logging is module else partial(self._plain, logging)
            return hear(*args, **kwargs)

        self._class.log = functools.update_wrapper(log, self._plain)

    @contextmanager
    def hearing(self, step: Any, share: float = 1.0) -> Iterator[StepRecord]:
        """Within the block a mini-batch's step runs, which is such a share of its batch."""
        self._step, self._record = step, StepRecord(share)
        if not step.is_repetition:
            self.records.append(self._record)
        has_results = self._is_last_stage and not step.out_of_turn and not step.is_repetition
        self.metrics.begin(
            is_real=self._reports and has_results,
            note=self._record.metric_calls if has_results and not self._reports else None,
            bring=step.at_last,
            of_last=step.of_last,
        )
        try:
            yield self._record
        finally:
            self._step = None
            self.metrics.end()

    @contextmanager
    def hearing_hook(self, step: Any, share: Callable[[Any], Any]) -> Iterator[None]:
        """Within the block a hook runs, which logs what may be of any stage; `share` gives rank 0's to all."""
        self._hook = step
        self.metrics.begin_hook(bring=step.bring, share=share, alone=step.alone)
        try:
            yield
        finally:
            self._hook = None
            self.metrics.end()

    def end(self) -> None:
        """The batch's steps are over: Lightning hears what they logged."""
        records, self.records = self.records, []
        if not self._reports:
            return
        heard: dict[tuple[str, int], list[tuple[float, dict[str, Any]]]] = {}
        for record in records:
            times: Counter[str] = Counter()
            for arguments in record.logged:
                name = arguments["name"]
                heard.setdefault((name, times[name]), []).append((record.share, arguments))
                times[name] += 1  # a step may log a name again: Lightning hears both, in their order
        for calls in heard.values():
            arguments = dict(calls[0][1] if len(calls) == 1 else _one_for_all(calls))
            line = arguments.pop(_LINE)
            try:
                self._plain(self._module, **arguments)
            except Exception as error:
                raise _with_line(error, line) from error

    def close(self) -> None:
        self._class.log = self._plain
        self.metrics.close()

    def _hear(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        del arguments["self"]
        arguments["sync_dist"] = True  # costs nothing with one reporter, and Lightning would recommend it
        if self._hook is not None:
            arguments["value"] = map_tensors(arguments["value"], self._hook.bring)
        if self._step is None:  # in a hook between steps
            if self._reports:
                with nullcontext() if self._hook is None else self._hook.alone():
                    self._plain(self._module, **arguments)
            return
        arguments["value"] = map_tensors(arguments["value"], self._step.bring)
        if self._is_last_stage:
            self._record.logged.append({**arguments, _LINE: user_line()})


class StepReports:
    """Brings the records of the last stage's replicas together on rank 0, which is the first of them."""

    def __init__(self, ranks: Sequence[int], log: StepLog, *, timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._log = log
        self._channel = ObjectChannel(timeout_s=timeout_s)

    def exchange(self, first: int) -> None:
        """The batch's steps have run, beginning with mini-batch `first`; rank 0 waits for those of other replicas."""
        records = self._log.records
        for index, record in enumerate(records):
            owner = self._ranks[(first + index) % len(self._ranks)]
            if owner == self._ranks[0]:
                continue
            if dist.get_rank() == self._ranks[0]:
                records[index] = self._received(owner)
            elif dist.get_rank() == owner:
                self._send(record)

    def close(self) -> None:
        self._channel.close()

    def _send(self, record: StepRecord) -> None:
        metrics = self._log.metrics
        logged = [{**arguments, "value": metrics.named(arguments["value"])} for arguments in record.logged]
        try:
            self._channel.send(_with_tensors_on_host(replace(record, logged=logged)), self._ranks[0])
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StageError(
                f"what the step logs or returns cannot be sent from rank {dist.get_rank()} to rank 0 ({error}); the "
                f"last stage has {len(self._ranks)} replicas: log numbers with reduce_fx by name, return tensors, or "
                f"plan the last stage onto one rank"
            ) from error

    def _received(self, owner: int) -> StepRecord:
        record: StepRecord = self._channel.receive(owner)
        self._log.metrics.replay(record.metric_calls)
        for arguments in record.logged:
            arguments["value"] = self._log.metrics.found(arguments["value"])
        return record


def _with_line(error: Exception, line: str) -> Exception:
    """The same kind of error, where it can be made of a text, with the line that logged."""
    try:
        return type(error)(f"{line}: {error}")
    except Exception:
        return error


def _with_tensors_on_host(record: StepRecord) -> StepRecord:
    """A record that can travel: its tensors detached from the step's graph, wherever they lie in it."""
    calls = [
        replace(call, args=map_tensors(call.args, _on_host), kwargs=map_tensors(call.kwargs, _on_host))
        for call in record.metric_calls
    ]
    return replace(
        record,
        logged=map_tensors(record.logged, _on_host),
        metric_calls=calls,
        output=map_tensors(record.output, _on_host),
    )


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _one_for_all(calls: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """The call that a step on the whole batch would have made."""
    values = [arguments["value"] for _, arguments in calls]
    arguments = dict(calls[0][1])
    if arguments.get("batch_size") is not None:  # log_dict passes None on
        arguments["batch_size"] = sum(other["batch_size"] for _, other in calls)
    if all(isinstance(value, Tensor | float | int) for value in values):
        tensors = [torch.as_tensor(value, dtype=torch.get_default_dtype()) for value in values]
        reduce_fx = arguments.get("reduce_fx", "mean")
        reduce = REDUCTIONS.get(getattr(reduce_fx, "__name__", reduce_fx))
        total = sum(share for share, _ in calls)  # some micro-batches may not have logged it
        shares = [share / total for share, _ in calls]
        arguments["value"] = mean_of(tensors, shares) if reduce is None else reduce(torch.stack(tensors))
    return arguments
