"""Workers that come and go: rules, the order of samples, agents, and a training whose every sample is looked at."""

import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import lightning as L
import pytest
import torch
from conftest import TIMEOUT_S, marked_processes
from elastic_training import BATCH, MOMENTUM, RATE, SAMPLES, Mean
from free_port import free_port
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from pl_pipe.adapt.agent import _without_traceback
from pl_pipe.adapt.claim import Claim
from pl_pipe.adapt.elastic_sampler import ElasticSampler, leaves_a_batch
from pl_pipe.adapt.policies import ElasticPolicy
from pl_pipe.adapt.policies.handover import Handover
from pl_pipe.adapt.provisioner import AGAIN, PLACE, VARIABLE, CommandProvisioner, FileProvisioner, provisioner_of
from pl_pipe.adapt.provisioning import Provisioning, parse_schedule, scheduled_workers
from pl_pipe.adapt.restarts import PatientAgent
from pl_pipe.errors import ConfigError
from pl_pipe.lab.agents import ENVIRONMENT, Agents, elastic_launcher


def dealt(samples: int, ranks: int, consumed: int, **settings: Any) -> list[list[int]]:
    found = []
    for rank in range(ranks):
        sampler = ElasticSampler(samples, rank=rank, ranks=ranks, shuffle=True, **settings)
        sampler.set_epoch(2)
        sampler.consumed = consumed
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rest_of_an_epoch_is_dealt_out_without_holes(ranks: int) -> None:
    whole = dealt(60, 1, 0)[0]
    assert sorted(whole) == list(range(60))
    batches = [one[: 4 * 2] for one in dealt(60, 3, 0)]  # four batches of two on three ranks
    assert sorted(sample for one in batches for sample in one) == sorted(whole[:24])
    rest = dealt(60, ranks, 24)
    assert sorted(sample for one in rest for sample in one) == sorted(whole[24:])
    assert {len(one) for one in rest} == {36 // ranks}


def test_ranks_have_equally_many_also_where_that_is_not_possible() -> None:
    rest = dealt(10, 3, 2)
    assert [len(one) for one in rest] == [3, 3, 3]
    assert {sample for one in rest for sample in one} >= set(dealt(10, 1, 2)[0])
    assert dealt(10, 3, 10) == [[], [], []]
    assert dealt(10, 2, 0) != [list(ElasticSampler(10, rank=r, ranks=2, shuffle=True)) for r in (0, 1)], "another epoch"
    assert list(ElasticSampler(5, rank=1, ranks=2, shuffle=False)) == [1, 3, 0]


def test_workers_are_added_while_they_are_worth_it() -> None:
    rule = Provisioning(most=8)
    assert rule.workers(1, 100.0) == 2
    assert rule.workers(2, 180.0) == 3
    assert rule.workers(3, 250.0) == 4
    again = Provisioning(most=8)
    again.load(json.loads(json.dumps(rule.state())))
    assert again.workers(4, 260.0) == 3, "less than (1 + 0.33/4) times 250"
    assert again.workers(3, 250.0) == 3
    assert again.settled


def test_workers_stay_within_their_limits() -> None:
    rule = Provisioning(least=1, most=2)
    assert rule.workers(1, 100.0) == 2
    assert rule.workers(2, 200.0) == 2
    assert Provisioning(least=2, most=4).workers(2, 10.0) == 3
    with pytest.raises(ConfigError, match="least=4 and most=2 workers contradict each other"):
        Provisioning(least=4, most=2)


def test_a_schedule_is_sizes_and_steps() -> None:
    schedule = parse_schedule("2:100, 3:50,1:5")
    assert [scheduled_workers(schedule, step) for step in (0, 99, 100, 149, 150, 154, 1000)] == [2, 2, 3, 3, 1, 1, 1]
    assert parse_schedule(["2:100", "3:50", "1:5"]) == schedule
    for bad in ("2", "2:x", "0:5", "2:100,,"):
        with pytest.raises(ConfigError, match=r"write size:steps with numbers of 1 or more"):
            parse_schedule(bad)
    with pytest.raises(ConfigError, match="wants 9 workers, least=1 and most=4 are the limits"):
        ElasticPolicy(folder="x", schedule="2:5,9:5")


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"pl_pipe\.adapt\.agent --nnodes 1:4 --nproc-per-node 1"):
        ElasticPolicy(folder=tmp_path).setup(None, None, "fit")  # type: ignore[arg-type]


def test_agents_of_several_workers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer, module, loader = elastic_run(monkeypatch, tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"this agent has 2 workers .*; start the agents with --nproc-per-node 1"):
        trainer.fit(module, loader)


def test_who_starts_workers_must_be_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="nobody would start or stop workers"):
        provisioner_of(None)
    with pytest.raises(ConfigError, match=r"has no \{workers\} in it"):
        provisioner_of("kubectl scale")
    asked = CommandProvisioner(f"{sys.executable} -c \"open('{tmp_path}/n', 'w').write('{{workers}}')\"")
    asked.request(3)
    assert asked._process is not None
    asked._process.wait(20)
    assert asked.is_done(after=0)
    assert not asked.is_done(after=1)
    assert (tmp_path / "n").read_text() == "3"
    assert asked.problem() is None


def test_a_command_that_cannot_work_is_said_at_once_or_when_it_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program 'kubctl' on rank 0's host; install it"):
        CommandProvisioner("kubctl scale --replicas={workers}").check()
    with pytest.raises(ConfigError, match="cannot be read: No closing quotation; mend its quotes"):
        CommandProvisioner("kubectl scale '{workers}")
    failing = CommandProvisioner(f"{sys.executable} -c 'import sys; {{1: 2}}; sys.exit(int(sys.argv[1]))' {{workers}}")
    failing.check()
    assert failing.problem() is None
    failing.request(3)
    assert failing._process is not None
    failing._process.wait(20)
    assert "ended with exit code 3" in str(failing.problem())


COMMAND = f"{sys.executable} -c 0 {{workers}}"
"""Of a provisioner who does nothing."""


def elastic_run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *more: Any, policy: Any = None, **settings: Any
) -> tuple[Any, Any, Any]:
    """Trainer, module and loader of one worker, as if torchrun had started it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    policy = policy or ElasticPolicy(folder=folder, schedule="1:1000", command=COMMAND)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=[policy, *more], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 2, "enable_checkpointing": bool(more), **settings},
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True)
    return trainer, Mean(folder), loader


def end_by_raising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that end to be started anew raise instead."""

    def end(code: int) -> None:
        raise KeyboardInterrupt(code)

    monkeypatch.setattr("os._exit", end)


def samples_by_epoch(folder: Path) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for line in (folder / "rank0.jsonl").read_text().splitlines():
        note = json.loads(line)
        found[note["epoch"]] += note["seen"]
    return [sorted(samples) for samples in found.values()]


class Labels(L.Callback):
    """Under which numbers the loop logs its steps."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(trainer.fit_loop.epoch_loop._batches_that_stepped)


@pytest.mark.parametrize("steps", [3, 6, 8])
def test_an_ordinary_checkpoint_is_gone_on_from_at_its_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """In the middle of an epoch, and at its last batch."""
    keeps = ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=steps)
    trainer, module, loader = elastic_run(monkeypatch, tmp_path, keeps, max_steps=steps)
    trainer.fit(module, loader)
    labels = Labels()
    again, module, loader = elastic_run(monkeypatch, tmp_path, labels, enable_checkpointing=False)
    again.fit(module, loader, ckpt_path=tmp_path / "kept.ckpt")
    assert samples_by_epoch(tmp_path) == [list(range(12))] * 2
    assert again.global_step == 12
    assert labels.found == list(range(steps, 12)), "loggers know steps by these"


def test_steps_keep_their_numbers_after_a_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What workers leave behind is saved before a batch, not after one."""

    class Leaves(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "left.ckpt")

    trainer, module, loader = elastic_run(monkeypatch, tmp_path, Leaves(), max_steps=6, enable_checkpointing=False)
    trainer.fit(module, loader)
    labels = Labels()
    again, module, loader = elastic_run(monkeypatch, tmp_path, labels, enable_checkpointing=False)
    again.fit(module, loader, ckpt_path=tmp_path / "left.ckpt")
    assert labels.found == list(range(4, 12))


def test_what_a_run_left_off_at_is_gone_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elastic.ckpt").touch()
    trainer, module, loader = elastic_run(monkeypatch, tmp_path)
    trainer.fit(module, loader)
    assert ElasticPolicy.checkpoint(tmp_path) is None
    assert not (tmp_path / "elastic.claim").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_workers_end_where_others_have_begun_after_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    """torchrun may take agents for gone that are only slow, and start workers on both sides."""

    class Others(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                Claim(tmp_path / "elastic.claim").made()
                if fails:
                    raise RuntimeError("Connection closed by peer")

    end_by_raising(monkeypatch)
    trainer, module, loader = elastic_run(monkeypatch, tmp_path, Others(), enable_checkpointing=False)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        trainer.fit(module, loader)
    codes = [one.args for one in (ended.value, ended.value.__context__, ended.value.__cause__) if one is not None]
    assert (AGAIN,) in codes
    assert trainer.global_step == 3
    assert (tmp_path / "elastic.claim").is_file(), "it is the others'"


@pytest.mark.parametrize(
    ("batches", "interval", "window", "changed_at"),
    [(18, 12, 3, 12), (6, 12, 3, 13), (12, 12, 3, 13), (18, 12, 50, 12), (5, 12, 50, 12), (6, 6, 50, 7)],
)
def test_throughput_decides_after_every_interval(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    batches: int,
    interval: int,
    window: int,
    changed_at: int,
) -> None:
    """Also one that is shorter than the window, and where it ends with an epoch: the change is a batch later there."""
    end_by_raising(monkeypatch)
    numbers = TensorDataset(torch.arange(2.0 * batches))
    policy = ElasticPolicy(folder=tmp_path, interval=interval, window=window, command=COMMAND, wait_s=0.1)
    trainer, module, _ = elastic_run(monkeypatch, tmp_path, policy=policy, max_epochs=10)
    with pytest.raises((KeyboardInterrupt, SystemExit)), caplog.at_level("INFO", logger="pl_pipe"):
        trainer.fit(module, DataLoader(numbers, batch_size=2, shuffle=True))
    assert trainer.global_step == changed_at
    assert [one.args[0] for one in caplog.records if "samples/s with" in one.msg] == [interval]  # type: ignore[index]
    again, module, _ = elastic_run(monkeypatch, tmp_path, max_epochs=3)
    again.fit(module, DataLoader(numbers, batch_size=2, shuffle=True), ckpt_path=ElasticPolicy.checkpoint(tmp_path))
    assert samples_by_epoch(tmp_path) == [list(range(2 * batches))] * 3


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_is_that_of_the_request_that_was_made_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_late: bool
) -> None:
    """Rank 1 of three waits to be ended; rank 0 asks for two when all have met, before that or after rank 1 waits."""
    requests = FileProvisioner(tmp_path / "workers.json")
    requests.request(3)
    requests.answer.write_text('{"number": 1}')
    trainer: Any = Mock(is_global_zero=False, world_size=3, global_step=1, loggers=[])

    def ask() -> None:
        requests.request(2)

    def answer() -> None:
        requests.answer.write_text('{"number": 2}')

    while_it_waits = [ask, Mock(), answer] if is_late else [Mock(), answer]
    if not is_late:
        trainer.strategy.barrier.side_effect = ask
    end_by_raising(monkeypatch)
    monkeypatch.setattr("time.sleep", lambda _: while_it_waits.pop(0)())
    monkeypatch.setattr("signal.signal", Mock())
    with pytest.raises(KeyboardInterrupt):
        Handover(requests, wait_s=60.0).make(trainer, 2, tmp_path / "elastic.ckpt")
    assert not while_it_waits


class Backwards(BatchSampler):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_an_epoch_is_not_handed_over_where_no_batch_would_be_left() -> None:
    """Of 24 samples 16 are consumed: two ranks have a batch of four each, three have none."""
    order = ElasticSampler(24, rank=0, ranks=2, shuffle=False)
    drops, keeps = (BatchSampler(order, 4, drop_last=drop) for drop in (True, False))
    assert [leaves_a_batch(drops, order, 16, ranks=ranks) for ranks in (1, 2, 3)] == [True, True, False]
    assert leaves_a_batch(keeps, order, 16, ranks=3)
    assert leaves_a_batch(drops, order, 0, ranks=9)


def test_a_rest_without_a_batch_is_not_the_end_of_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five of seven samples in batches of five; then by batches of three, of which two are none."""
    keeps = ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=1)
    trainer, module, _ = elastic_run(monkeypatch, tmp_path, keeps, max_steps=1)
    numbers = TensorDataset(torch.arange(7.0))
    trainer.fit(module, DataLoader(numbers, batch_size=5))
    again, module, _ = elastic_run(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="would get no whole batch any more"):
        again.fit(module, DataLoader(numbers, batch_size=3, drop_last=True), ckpt_path=tmp_path / "kept.ckpt")


def test_the_place_in_the_epoch_is_that_of_the_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the first dimension of batches is not that of samples."""

    def transposed(samples: list[Any]) -> list[torch.Tensor]:
        return [torch.stack([sample[0] for sample in samples]).expand(5, -1)]

    class FirstRow(Mean):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0][0]], batch_idx)

    for steps, path in ((4, None), (-1, tmp_path / "kept.ckpt")):
        keeps = ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=4)
        trainer, _, loader = elastic_run(monkeypatch, tmp_path, keeps, max_steps=steps, max_epochs=1)
        batches = DataLoader(loader.dataset, batch_size=2, shuffle=True, collate_fn=transposed)
        trainer.fit(FirstRow(tmp_path), batches, ckpt_path=path)
    assert samples_by_epoch(tmp_path) == [list(range(12))]


def test_workers_that_are_never_prepared_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock_s = iter(range(10_000))
    monkeypatch.setattr("pl_pipe.adapt.policies.handover.time.monotonic", lambda: next(clock_s))
    policy = ElasticPolicy(folder=tmp_path, interval=3, window=1, command=COMMAND, wait_s=20)
    trainer, module, loader = elastic_run(monkeypatch, tmp_path, policy=policy, max_epochs=10)
    with caplog.at_level("WARNING", logger="pl_pipe"), patch.object(CommandProvisioner, "is_prepared", lambda _: False):
        trainer.fit(module, loader)
    assert trainer.global_step == 60
    assert "2 worker(s) were asked for, and are not prepared after 20 s; training goes on with 1" in caplog.text
    assert (policy.wanted, policy._missed) == (None, 2)


@pytest.mark.parametrize(
    ("settings", "sampler", "words"),
    [
        ({"limit_train_batches": 3}, None, "trainer.limit_train_batches=3: workers that come"),
        ({"limit_train_batches": 1}, None, "trainer.limit_train_batches=1: workers that come"),
        ({}, "backwards", "a Backwards has an order of batches of its own"),
        ({}, RandomSampler(range(12), replacement=True), "RandomSampler with replacement or num_samples"),
        ({}, WeightedRandomSampler([1.0] * 12, 12), "WeightedRandomSampler gives the order"),
        ({}, "two", "there are 2 training loaders, and the place in the epoch is kept of one alone"),
    ],
)
def test_epochs_that_cannot_be_divided_anew_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], sampler: Any, words: str
) -> None:
    trainer, module, loader = elastic_run(monkeypatch, tmp_path, **settings)
    if sampler == "two":
        loader = {"one": loader, "other": DataLoader(TensorDataset(torch.arange(20.0)), batch_size=2)}
    elif sampler == "backwards":
        loader = DataLoader(loader.dataset, batch_sampler=Backwards(range(12), 2, drop_last=False))
    elif sampler is not None:
        loader = DataLoader(loader.dataset, batch_size=2, sampler=sampler)
    with pytest.raises(ConfigError, match=words):
        trainer.fit(module, loader)


def test_workers_that_do_not_come_are_not_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=True, global_step=5)
    before = ElasticPolicy(folder="x", schedule="2:4,3:6,1:9")
    assert before.decide(trainer).number == 3  # type: ignore[union-attr]
    before._asked = 3
    after = ElasticPolicy(folder="x", schedule="2:4,3:6,1:9")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    with caplog.at_level("WARNING"):
        after._compare_with_request(trainer)
    assert (
        "3 worker(s) were asked for, and there are 2; training goes on with these. Look at what starts" in caplog.text
    )
    assert after.decide(trainer) is None
    assert after.rule.settled
    trainer.global_step = 10
    assert after.decide(trainer).number == 1  # type: ignore[union-attr]
    after._asked = 1
    with caplog.at_level("WARNING"):
        after._compare_with_request(trainer)
    assert (
        "1 worker(s) were asked for, and there are 2; training goes on with these. What ends workers must"
        in caplog.text
    )


def test_a_decision_that_was_not_carried_out_is_made_anew() -> None:
    """As of a checkpoint at the end of the epoch whose last batch decided."""
    policy = ElasticPolicy(folder="x")
    policy.rule.settled, policy.wanted = True, 1
    assert not policy.state_dict()["rule"]["settled"]
    policy._asked = 1
    assert policy.state_dict()["rule"]["settled"]


@pytest.mark.parametrize(
    ("codes", "waiting", "left"),
    [([AGAIN], 0, 1), ([AGAIN, AGAIN], 0, 1), ([1], 0, 0), ([AGAIN, 1], 0, 0), ([1], 1, 1), ([-9], 0, 0)],
)
def test_workers_that_ask_to_be_started_anew_have_not_failed(codes: list[int], waiting: int, left: int) -> None:
    """torchrun takes one off before it starts anew, and gives up at 0."""
    failures = {place: SimpleNamespace(exitcode=code) for place, code in enumerate(codes)}
    agent = PatientAgent.__new__(PatientAgent)
    agent._remaining_restarts = 0
    group = Mock()
    group.spec.rdzv_handler.num_nodes_waiting.return_value = waiting
    with patch.object(
        LocalElasticAgent, "_monitor_workers", return_value=RunResult(state=WorkerState.FAILED, failures=failures)
    ):
        agent._monitor_workers(group)
    assert agent._remaining_restarts == left
    words = f"failed (exitcode: {codes[0]}) local_rank: 0 (pid: 1) of fn: work"
    record = logging.LogRecord("torch", logging.ERROR, "api.py", 1, words, (), None)
    assert _without_traceback(record) == (codes[0] != AGAIN), "no failure is told of"


@pytest.mark.slow
def test_a_run_that_fails_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('begun', flush=True); raise ValueError('my own fault')")
    endpoint = f"127.0.0.1:{free_port()}"
    command = elastic_launcher(
        [str(tmp_path / "program.py")],
        least=1, most=2, endpoint=endpoint, run="fails", address="127.0.0.1", is_first=True,
    )  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 1
    assert done.stdout.count("begun") == 1
    assert "my own fault" in done.stderr


def test_agents_come_and_go_as_they_are_asked_for(tmp_path: Path) -> None:
    """Agents here are sleepers; the second asks for another, the last for one less, then the first two end."""
    requests = FileProvisioner(tmp_path / "workers.json")
    started: list[subprocess.Popen[Any]] = []
    said: list[str] = []

    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        if place == 2:
            requests.request(2)
        program = f"import pathlib, time\nwhile not pathlib.Path('{tmp_path}/end').exists(): time.sleep(0.02)"
        started.append(subprocess.Popen([sys.executable, "-c", program], start_new_session=True))
        return started[-1]

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("3 ->"):
            (tmp_path / "end").touch()

    requests.request(3)
    assert not requests.is_done(after=0)
    assert Agents(start, requests.path, say=say).serve(2) == 0
    assert said == ["2 -> 3 agent(s)", "3 -> 2 agent(s)"]
    assert requests.is_done(after=1)
    assert [agent.returncode for agent in started][2] != 0
    assert [agent.returncode for agent in started][:2] == [0, 0]


def test_agents_are_prepared_and_wait_until_they_are_asked_for(tmp_path: Path) -> None:
    """Two waiters are started for a request that comes later, and wants one of them."""
    requests = FileProvisioner(tmp_path / "workers.json")
    seen: list[tuple[int, bool, bool]] = []

    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        seen.append((place, PLACE in more, requests.is_done(after=0)))
        if PLACE in more:
            assert not requests.is_waiting(place), "one that was ended while it waited there"
            assert not requests.wants(place)
            requests.waiting_at(place).__enter__()  # as an agent does, in a process of its own
        program = f"import pathlib, time\nwhile not pathlib.Path('{tmp_path}/end').exists(): time.sleep(0.02)"
        return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

    def say(line: str) -> None:
        assert line == "1 -> 2 agent(s)"
        assert requests.wants(1)
        assert not requests.wants(2)
        (tmp_path / "end").touch()

    agents = Agents(start, requests.path, say=say)
    requests.waiting_at(2).__enter__()
    answer = agents._answer

    def answered() -> None:
        if requests.is_prepared() and not requests.asked()["go"]:
            requests.request(2)
        answer()

    agents._answer = answered  # type: ignore[method-assign]
    requests.prepare(3)
    assert agents.serve(1) == 0
    assert seen == [(0, False, False), (1, True, False), (2, True, False)]
    assert requests.is_done(after=1)


def test_an_agent_that_fails_while_it_waits_is_no_failure_of_the_run(tmp_path: Path) -> None:
    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        program = "import sys; sys.exit(3)" if place else "import time; time.sleep(1)"
        return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

    said: list[str] = []
    assert Agents(start, tmp_path / "workers.json", say=said.append).serve(1, most=2) == 0
    assert said == ["agent 1, which waited, ended with exit code 3"]


@pytest.mark.parametrize(("most", "waiting"), [(1, []), (2, [1]), (4, [1])])
def test_one_more_agent_waits_from_the_beginning(tmp_path: Path, most: int, waiting: list[int]) -> None:
    """It is not asked for here, and ends with the run."""
    started: dict[int, tuple[bool, subprocess.Popen[Any]]] = {}

    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        program = f"import time; time.sleep(0.5 if {place} == 0 else 600)"
        started[place] = PLACE in more, subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        return started[place][1]

    assert Agents(start, tmp_path / "workers.json", say=print).serve(1, most=most) == 0
    assert [place for place, (waits, _) in started.items() if waits] == waiting
    assert all(agent.returncode is not None for _, agent in started.values()), "one was left behind"


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("class SIGTERMException(SystemExit): pass\nraise SIGTERMException", 143, ""),
        ("import atexit, sys; atexit.register(print, *sys.argv[1:])", 0, "one two"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_warm_worker_runs_a_program_as_python_would(tmp_path: Path, program: str, code: int, words: str) -> None:
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "numpy.py").write_text("class random:\n    seed = staticmethod(lambda: print('anew'))\n")
    run = f"from pl_pipe.adapt.agent import work; work(False, '{tmp_path}/program.py', ['one', 'two']); print('ended')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", run], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert ("ended" in done.stdout) == (code == 0)
    assert "anew" in done.stdout, "forked processes would draw the same numbers"


def test_an_agent_that_fails_is_the_exit_code(tmp_path: Path) -> None:
    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        return subprocess.Popen([sys.executable, "-c", f"import sys; sys.exit({3 * place})"], start_new_session=True)

    said: list[str] = []
    assert Agents(start, tmp_path / "none.json", say=said.append).serve(2) == 3
    assert said == ["agent 1 ended with exit code 3; the others have 30 s to end"]


@pytest.mark.slow
def test_two_three_and_two_workers_train_as_one_would(tmp_path: Path) -> None:
    mark = f"elastic-{tmp_path.name}"
    environment = {
        **os.environ, **ENVIRONMENT, "PL_PIPE_TEST_MARK": mark, "OMP_NUM_THREADS": "1",
        VARIABLE: str(tmp_path / "workers.json"), "PYTHONPATH": str(Path(__file__).parent),
        "PL_PIPE_CACHE": str(tmp_path),
    }  # fmt: skip
    endpoint = f"127.0.0.1:{free_port()}"
    logs = []

    def start(place: int, more: Mapping[str, str]) -> subprocess.Popen[Any]:
        program = [str(Path(__file__).with_name("elastic_training.py")), str(tmp_path), "2:4,3:6,2:1000"]
        command = elastic_launcher(
            program,
            least=1,
            most=3,
            endpoint=endpoint,
            run="elastic",
            address="127.0.0.1",
            is_first=place == 0,
        )
        logs.append(tmp_path / f"agent{len(logs)}.log")
        with logs[-1].open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], env={**environment, **more}, start_new_session=True, stdout=log, stderr=log
            )

    code = Agents(start, tmp_path / "workers.json", say=lambda _: None).serve(2)
    left = marked_processes(mark)
    for process in left:
        process.kill()
    words = "\n".join(log.read_text()[-3000:] for log in logs)
    assert code == 0, words
    assert not left
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for file in tmp_path.glob("rank*.jsonl"):
        for line in file.read_text().splitlines():
            note = json.loads(line)
            by_step[note["step"]].append(note)
    sizes = {step: len(notes) for step, notes in by_step.items()}
    assert sizes == {step: 3 if 4 < step <= 10 else 2 for step in range(1, 17 + 20 + 1)}
    seen: dict[int, list[int]] = defaultdict(list)
    w, velocity = 0.0, 0.0
    for step in sorted(by_step):
        samples = [sample for note in by_step[step] for sample in note["seen"]]
        assert {note["epoch"] for note in by_step[step]} == {0 if step <= 17 else 1}
        assert len(samples) == BATCH * sizes[step]
        seen[by_step[step][0]["epoch"]] += samples
        velocity = MOMENTUM * velocity + (w - sum(samples) / len(samples))
        w -= RATE * velocity
        assert [note["w"] for note in by_step[step]] == pytest.approx([w] * sizes[step], rel=1e-6)
    assert [sorted(samples) for samples in seen.values()] == [list(range(SAMPLES))] * 2
    assert (tmp_path / "epochs.txt").read_text().split() == ["0", "1", "1", "2"], "as in a single run"
