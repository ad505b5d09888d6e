"""A pytest plugin: Lightning's own tests with another strategy in the place of the one that a Trainer has by default.

    PYTHONPATH=<checkout>:<checkout>/tests python -m pytest -p ordinary.substituted --substitute pipeline \
        --outcomes pipeline.jsonl --among ddp.jsonl <Lightning's sources>/tests/tests_pytorch/loops

The reference is `--substitute ddp`: tests that fail with plain DDP say nothing about our strategies. The file of
outcomes grows, and of each test its last line counts; `--again` runs only what has failed by it. An error of ours
counts as `refused`: it names the fact and a remedy.

Over several ranks, each test in processes of its own, all of those in a file of outcomes or a sample of them:

    python tests/ordinary/substituted.py ddp ddp2.jsonl --among ddp.jsonl --sample 200 <…>/tests/tests_pytorch
    python tests/ordinary/substituted.py 1f1b pipeline2.jsonl --among ddp2.jsonl <…>/tests/tests_pytorch
"""

import argparse
import functools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import DDPStrategy

from pl_pipe.errors import PlPipeError
from pl_pipe.strategies import AdaptiveCommStrategy, FusionStrategy, PipeDreamStrategy
from pl_pipe.strategies.fusion.variant_log import VariantLog

if TYPE_CHECKING:
    from pipedream_tasks import Rank

_MOCKS_ITSELF = (
    "puts strategy.backward in the place of Strategy.backward, which an overriding method then calls for ever"
)
_DRIVES_LOOPS = "drives Lightning's private loops after the fit"
_IS_ANOTHER = "waits for calls with its own model, and the variant is another object"
_ARE_SAVED = "variants are saved when training ends, too"
_MANUAL = "trainer/optimization/test_manual_optimization.py::test_"
_OPTIMIZERS = "trainer/optimization/test_optimizers.py::test_"
_LOGS_ON_0 = "asks a logger's mock on each rank, and of a pipeline rank 0 alone logs, as loggers' files are its alone"
_OF_ALL = {
    "checkpointing/test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options": (
        "puts a mock in the place of TorchCheckpointIO.save_checkpoint, of which ours wants a file"
    ),
}
_OF_OWN_BACKWARD = {
    **_OF_ALL,
    f"{_MANUAL}multiple_optimizers_manual_call_counts": _MOCKS_ITSELF,
    f"{_MANUAL}multiple_optimizers_manual_log": _MOCKS_ITSELF,
    f"{_MANUAL}step_with_optimizer_closure": _MOCKS_ITSELF,
    "callbacks/test_stochastic_weight_avg.py::test_swa_callback": _MOCKS_ITSELF,
    "callbacks/test_stochastic_weight_avg.py::test_swa_resume": _MOCKS_ITSELF,
}
_OF_FUSION = {
    f"{_OPTIMIZERS}multi_optimizer_with_scheduling": "trainer.optimizers is one that holds those of all variants",
    f"{_OPTIMIZERS}reducelronplateau_scheduling": "compares a scheduler's name, which tells whose rate is shown",
    f"{_OPTIMIZERS}plateau_scheduler_lr_step_interval_updated_after_saving": _ARE_SAVED,
    "trainer/test_trainer.py::test_keyboard_interrupt": "has a mock for the launcher, which makes variants",
    "callbacks/test_throughput_monitor.py": "time.perf_counter is a mock, by which ways to compute a step are timed",
    "callbacks/test_prediction_writer.py::test_prediction_writer_batch_indices": _IS_ANOTHER,
    "callbacks/test_prediction_writer.py::test_batch_level_batch_indices": _IS_ANOTHER,
    "checkpointing/test_checkpoint_callback_frequency.py::test_default_checkpoint_freq": _ARE_SAVED,
    "checkpointing/test_checkpoint_callback_frequency.py::test_top_k": _ARE_SAVED,
    "core/test_datamodules.py::test_datamodule_hooks_are_profiled": _ARE_SAVED,
    "core/test_metric_result_integration.py::test_metric_collections": "a metric's path names its variant",
    "callbacks/test_lr_monitor.py": "compares the names of rates, which say whose they are",
    "loops/optimization/test_closure.py::test_optimizer_step_no_closure_raises": "works: gradients are there before it",
    "loops/test_evaluation_loop_flow.py::test__eval_step__flow": _DRIVES_LOOPS,
    "loops/test_training_loop_flow_scalar.py::test__training_step__epoch_end__flow_scalar": _DRIVES_LOOPS,
    "loops/test_training_loop_flow_scalar.py::test_training_step_no_return_when_even": _DRIVES_LOOPS,
}
SAY_NOTHING = {
    "ddp": {},
    "adaptive": _OF_ALL,
    "pipeline": _OF_OWN_BACKWARD,
    "1f1b": {
        **_OF_OWN_BACKWARD,
        "trainer/optimization/test_backward_calls.py::test_backward_count": _MOCKS_ITSELF,
        "trainer/test_trainer.py::test_log_every_n_steps": _LOGS_ON_0,
        "trainer/logging_/test_train_loop_logging.py::test_log_metrics_epoch_step_values": _LOGS_ON_0,
    },
    "fusion": {**_OF_OWN_BACKWARD, **_OF_FUSION},
}
"""Tests, by the beginning of their names, that cannot hold for another strategy than the default, and why."""


_SUFFIX = "/variant_0"


class OneVariant(FusionStrategy):
    """The one variant is another object than the test's model, but has its attributes: what one sets, both have. What
    it logs and predicts has no suffix, since tests look for their own names."""

    def prepare(self, module: L.LightningModule, **kwargs: Any) -> Any:
        self._factory = functools.partial(_twin, module)
        return super().prepare(module, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        (found,) = super().predict_step(*args, **kwargs).values()
        return found

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for config in self.lr_scheduler_configs:
            config.name = config.name and config.name.removesuffix(_SUFFIX)
            config.monitor = config.monitor and config.monitor.removesuffix(_SUFFIX)


def _twin(module: L.LightningModule) -> L.LightningModule:
    made = object.__new__(type(module))
    made.__dict__ = module.__dict__
    return made


def _log_plainly(log: Any, speaker: Any, *, name: str, **said: Any) -> None:
    log(speaker, name=name.removesuffix(_SUFFIX), **said)


def _log_by_plain_names() -> None:
    """The variant's metrics are `loss`, not `loss/variant_0`."""
    plain: Any = VariantLog.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        self._plain = functools.partial(_log_plainly, self._plain)

    VariantLog.__init__ = init  # type: ignore[method-assign]


MODES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "pipeline": lambda: PipeDreamStrategy(schedule="1f1b", num_microbatches=1),
    "1f1b": lambda: PipeDreamStrategy(schedule="1f1b"),
    "adaptive": AdaptiveCommStrategy,
    "fusion": lambda: OneVariant(variants=[{}], folder=tempfile.mkdtemp()),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("substituted strategies")
    group.addoption("--substitute", choices=sorted(MODES), help="what a Trainer gets that names no strategy")
    group.addoption("--outcomes", type=Path, help="a file to which each test's outcome is added")
    group.addoption("--among", type=Path, help="only tests that have passed according to this file of outcomes")
    group.addoption("--ranks", type=int, default=1, help="how many processes run the tests together")
    group.addoption("--again", action="store_true", help="only tests that have failed, or are not in --outcomes")


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("--substitute")
    if mode is None:
        return
    plain = L.Trainer.__init__

    @functools.wraps(plain)
    def init(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if not _is_plain(kwargs):
            pytest.skip("says itself what it runs on")
        kwargs.update(strategy=MODES[mode](), devices=config.getoption("--ranks"), accelerator="cpu")
        outcomes.is_used = True
        plain(self, *args, **kwargs)

    patched: Any = L.Trainer
    patched.__init__ = init
    watching: Any = _ChildProcessObserver.__init__
    watching.__defaults__ = (0.05,)  # its period in seconds; Lightning's tests wait for its end
    if mode == "fusion":
        _log_by_plain_names()
    outcomes = _Outcomes(config)
    config.pluginmanager.register(outcomes, "outcomes of substituted strategies")


def _is_plain(options: dict[str, Any]) -> bool:
    """A Trainer on one CPU device that leaves the strategy to Lightning."""
    return (
        options.get("strategy", "auto") == "auto"
        and options.get("accelerator", "auto") in ("auto", "cpu")
        and options.get("devices", "auto") in ("auto", 1, "1")
        and options.get("num_nodes", 1) == 1
    )


class _Outcomes:
    def __init__(self, config: pytest.Config) -> None:
        self.is_worker = hasattr(config, "workerinput")
        self.path: Path | None = config.getoption("--outcomes")
        self.before: dict[str, list[str]] = _read(self.path)
        among = config.getoption("--among")
        self.left_out = tuple(SAY_NOTHING[config.getoption("--substitute")])
        self.among = None if among is None else _read(among)
        self.again = config.getoption("--again")
        self.found: dict[str, list[str]] = {}
        """Of each test: passed, unused (it has passed without the strategy), skipped, refused or failed; its error."""
        self.is_used = False
        """By the test that runs."""

    def pytest_runtest_setup(self) -> None:
        self.is_used = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        def is_wanted(name: str) -> bool:
            if name.startswith(self.left_out):
                return False
            if self.among is not None and self.among.get(name, ["?"])[0] != "passed":
                return False
            return not self.again or self.before.get(name, ["failed"])[0] == "failed"

        left_out = [item for item in items if not is_wanted(_name(item.nodeid))]
        items[:] = [item for item in items if is_wanted(_name(item.nodeid))]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.excinfo is not None and report.outcome == "failed":
            error = next(filter(_is_ours, _chain(call.excinfo.value)), call.excinfo.value)
            kind = "refused" if _is_ours(error) else "failed"
            report.user_properties.append((kind, f"{type(error).__name__}: {str(error)[:400]}"))
        elif report.when == "call" and report.outcome == "passed" and not self.is_used:
            report.user_properties.append(("unused", ""))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        kinds = dict(report.user_properties)
        if report.outcome == "failed":
            kind, error = kinds.popitem() if kinds else ("failed", "crashed")
            self._note(name, kind, str(error))
        elif report.when == "call" or report.outcome == "skipped":
            self._note(name, "unused" if "unused" in kinds else report.outcome)

    def _note(self, name: str, kind: str, error: str = "") -> None:
        self.found[name] = [kind, error]
        if self.path is not None and not self.is_worker:
            with self.path.open("a") as file:
                file.write(json.dumps([name, kind, error]) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        known = {**self.before, **self.found}
        names = {name for name in known if not name.startswith(self.left_out)}
        names = (
            names
            if self.among is None
            else names & {name for name, (kind, _) in self.among.items() if kind == "passed"}
        )
        counted = Counter(known[name][0] for name in names)
        terminalreporter.write_line(", ".join(f"{number} {kind}" for kind, number in sorted(counted.items())))


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, PlPipeError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """A test that waits for another error, or a warning, fails with one of its own after ours."""
    while error is not None:
        yield error
        error = error.__context__


def _name(nodeid: str) -> str:
    """From the folder below `tests_pytorch`, wherever that is."""
    return nodeid.rpartition("tests_pytorch/")[2]


def _read(path: Path | None) -> dict[str, list[str]]:
    if path is None or not path.is_file():
        return {}
    return {name: outcome for name, *outcome in map(json.loads, path.read_text().splitlines())}


# ---- over several ranks


def run(me: "Rank", *, test: str, mode: str, sources: str) -> dict[str, Any]:
    """A rank's part of one test: [kind, error]."""
    sys.path.insert(0, str(Path(sources).parent))
    outcomes = me.folder / f"outcomes{me.rank}.jsonl"
    options = ["--substitute", mode, "--ranks", str(me.ranks), "--outcomes", str(outcomes), "-p", "no:cacheprovider"]
    pytest.main(["-p", "ordinary.substituted", *options, f"{sources}/{test}"])
    me.notes["outcome"] = _read(outcomes).get(test, ["failed", "not collected"])
    return me.notes


def main() -> None:
    from pipedream_farm import Farm, Order

    parser = argparse.ArgumentParser(description="Lightning's tests over several ranks.")
    parser.add_argument("mode", choices=sorted(MODES))
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("sources", type=lambda path: str(Path(path).resolve()), help="Lightning's tests/tests_pytorch")
    parser.add_argument("--among", type=Path, required=True, help="only tests that have passed by this file")
    parser.add_argument("--sample", type=int, help="of those, so many by chance")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    tests = [name for name, (kind, _) in _read(given.among).items() if kind == "passed"]
    tests = [name for name in sorted(tests) if not name.startswith(tuple(SAY_NOTHING[given.mode]))]
    if given.sample is not None:
        tests = random.Random(1).sample(tests, min(given.sample, len(tests)))
    farm = Farm(Path(tempfile.mkdtemp()))
    order = functools.partial(
        Order, "ordinary.substituted.run", ranks=given.ranks, timeout_s=120, mode=given.mode, sources=given.sources
    )
    jobs = {test: farm.start(order(test=test), urgent=False) for test in tests}
    counted: Counter[str] = Counter()
    for test, job in jobs.items():
        try:
            found = [one.get("outcome", ["failed", one.get("error", "")]) for one in job.results]
        except AssertionError as error:
            found = [["failed", str(error)[:400]]]
        kind, error = max(found, key=lambda one: ("passed", "unused", "skipped", "refused", "failed").index(one[0]))
        counted[kind] += 1
        with given.outcomes.open("a") as file:
            file.write(json.dumps([test, kind, error]) + "\n")
    farm.close()
    sys.stdout.write(", ".join(f"{number} {kind}" for kind, number in sorted(counted.items())) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
