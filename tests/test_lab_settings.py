"""A lab's settings, before anything is set up: links as text, hosts, what a plan counts on, what is refused."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_pipe.cli.lab import _waited_for, split_at_dashes
from pl_pipe.cli.lab_command import elastic_limits, program_of
from pl_pipe.cluster import (
    Cluster,
    ClusterConfig,
    Flow,
    LabConfig,
    Level,
    Link,
    LinkConfig,
    RehearsedCluster,
    is_described,
    planned_cluster,
)
from pl_pipe.cluster.link_text import format_rate, parse_delay, parse_loss, parse_rate
from pl_pipe.errors import ConfigError, LabError
from pl_pipe.lab import Lab, rehearsal, shaping, state, tools
from pl_pipe.lab.interruption import ending_by_exception
from pl_pipe.lab.layout import Layout, is_a_labs
from pl_pipe.lab.output import copy_output
from pl_pipe.lab.rehearsal import host_environment, launcher
from pl_pipe.lab.state import LabState, Owner, RunningFlow
from tests.conftest import Inside

FAST = LinkConfig(rate="1gbit")


@given(st.integers(10_000, 10**12))
def test_a_rate_survives_its_text(bits_per_s: int) -> None:
    assert parse_rate(format_rate(bits_per_s), name="rate") == pytest.approx(bits_per_s, rel=1e-9)


def test_links_are_read_as_tc_writes_them() -> None:
    assert parse_rate("100mbit", name="rate") == 1e8
    assert parse_rate("2.5Gbit", name="rate") == 2.5e9
    assert parse_delay("200us", name="latency") == pytest.approx(2e-4)
    assert parse_delay("0", name="latency") == 0
    assert parse_loss("0.1%", name="loss") == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"between": LinkConfig(rate="fast")}, r"cluster.lab.between.rate=fast is no rate .* such as 100mbit"),
        ({"between": LinkConfig(rate="100")}, "cluster.lab.between.rate=100 is no rate"),
        ({"between": LinkConfig(rate="0gbit")}, "cluster.lab.between.rate=0gbit is no rate"),
        ({"between": LinkConfig(rate="100MB")}, "no rate"),
        ({"between": LinkConfig(rate="10tbit")}, "cluster.lab.between.rate=10tbit is more than 1tbit; give a rate up"),
        ({"inside": LinkConfig(latency="5")}, r"cluster.lab.inside.latency=5 is no delay; give one such as 200us"),
        ({"between": LinkConfig(latency="2000s")}, r"latency=2000s is longer than 60s"),
        ({"between": LinkConfig(loss="0.1")}, r"cluster.lab.between.loss=0.1 is no loss; give a percentage"),
        ({"between": LinkConfig(loss="100%")}, "loss=100% leaves no packet"),
        ({"hosts": 0}, "cluster.lab.hosts=0; give 1 or more"),
        ({"devices_per_host": 0}, "cluster.lab.devices_per_host=0; give 1 or more"),
        ({"spectators": -1}, "cluster.lab.spectators=-1; give 0 or more"),
        ({"hosts": 4, "spectators": 61}, "make 65 hosts; one machine rehearses 64 at most"),
        ({"links": {"host9": FAST}}, r"cluster.lab.links names host9, .* its hosts are host0, host1"),
        ({"traffic": "host0"}, "cluster.lab.traffic=host0 is no list"),
        ({"traffic": [{"from": "host0"}]}, r"has the entry .*; give each as \{from: host1, to: host3, rate: 300mbit\}"),
        (
            {"traffic": [{"from": "host0", "to": "spectator0", "rate": "1mbit"}]},
            "names spectator0, which the lab has not",
        ),
        ({"traffic": [{"from": "host0", "to": "host0", "rate": "1mbit"}]}, "from host0 to itself, over no link"),
        ({"traffic": 2 * [{"from": "host0", "to": "host1", "rate": "1mbit"}]}, "two entries from host0 to host1"),
    ],
)
def test_what_cannot_be_set_up_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RehearsedCluster.of(LabConfig(**settings))


def test_hosts_that_differ_keep_the_rest_of_the_common_link() -> None:
    config = LabConfig(
        hosts=3, between=LinkConfig(rate="1gbit", latency="1ms"), links={"host2": LinkConfig(rate="10mbit")}
    )
    assert RehearsedCluster.of(config).links == {
        "host0": Link(1e9, 1e-3), "host1": Link(1e9, 1e-3), "host2": Link(1e7, 1e-3),
    }  # fmt: skip


def test_a_plan_counts_on_the_links_as_declared() -> None:
    two_level = LabConfig(
        hosts=2, devices_per_host=4, between=LinkConfig(rate="200mbit", latency="1ms"), inside=LinkConfig(rate="10gbit")
    )
    config = ClusterConfig(lab=two_level)
    assert is_described(config)
    assert planned_cluster(config) == Cluster((Level(4, 1.25e9), Level(2, 2.5e7, 1e-3)))
    slowest = LabConfig(hosts=4, between=FAST, links={"host1": LinkConfig(rate="80mbit")}, spectators=2)
    assert planned_cluster(ClusterConfig(lab=slowest)) == Cluster((Level(4, 1e7),))
    one = LabConfig(hosts=1, devices_per_host=3)
    machine = Cluster((Level(3, 3e9, all_reduce_factor=3.0),))
    assert planned_cluster(ClusterConfig(lab=one)) == machine
    one.inside = LinkConfig(rate="100gbit")
    assert planned_cluster(ClusterConfig(lab=one)) == machine, "a cap beyond what the machine gives changes nothing"
    assert planned_cluster(ClusterConfig(lab=LabConfig(hosts=3))) == machine, "neither does a bridge without caps"
    costs = []
    for gbit in (8, 16, 20, 23, 24, 25):
        one.inside = LinkConfig(rate=f"{gbit}gbit")
        costs.append(planned_cluster(ClusterConfig(lab=one)).levels[0].all_reduce_s(1e9, 3))
    assert costs == sorted(costs, reverse=True), "a faster link never makes an all-reduce slower"
    with pytest.raises(ConfigError, match=r"got cluster\.devices and cluster\.lab"):
        planned_cluster(ClusterConfig(devices=4, lab=slowest))


def test_the_run_plans_for_its_cluster_group() -> None:
    from pl_pipe.strategies import PipeDreamStrategy
    from pl_pipe.strategies.pipeline.described_links import plan_for

    lab = ClusterConfig(lab=LabConfig(hosts=2, between=FAST))
    open_ = PipeDreamStrategy()
    plan_for(open_, lab)
    assert open_.settings.cluster == Cluster((Level(2, 1.25e8),))
    for told in (PipeDreamStrategy(cluster="probe"), PipeDreamStrategy(plan="plan.json")):
        before = told.settings
        plan_for(told, lab)
        assert told.settings == before
    unchanged = PipeDreamStrategy()
    plan_for(unchanged, ClusterConfig(interface="eth0"))
    assert unchanged.settings.cluster == "local"


def test_tc_is_told_of_rates_on_both_ends_and_of_halves_of_the_rest() -> None:
    assert shaping.commands(Link(), device="eth0") == []
    assert shaping.commands(Link(1e9), device="eth0") == [
        "qdisc replace dev eth0 root handle 1: tbf rate 1000000000bit burst 1250000 limit 1250000 "
        "peakrate 1150000000bit mtu 250000"
    ]
    _, netem = shaping.commands(Link(1e6, 0.01, 0.002), device="host0")
    assert netem == "qdisc replace dev host0 parent 1:1 handle 10: netem limit 100000 delay 5ms loss 0.1%"
    (alone,) = shaping.commands(Link(None, 0.0005), device="lo", whole=True)
    assert alone == "qdisc replace dev lo root handle 10: netem limit 100000 delay 500us"


def test_a_link_is_changed_in_place_unless_its_queues_are_others() -> None:
    capped, distant = Link(1e9), Link(1e9, 1e-3)
    deleted = "qdisc del dev eth0 root"
    assert deleted not in shaping.commands(Link(1e8), device="eth0", before=capped)
    assert deleted not in shaping.commands(capped, device="eth0", before=Link())
    assert shaping.commands(distant, device="eth0", before=capped)[0] == deleted
    assert shaping.commands(Link(), device="eth0", before=distant) == [deleted]


def test_names_and_addresses() -> None:
    layout = Layout("3f9a2c", ("host0", "host1", "spectator0"))
    assert layout.namespaces == (
        "plpipe-3f9a2c-host0", "plpipe-3f9a2c-host1", "plpipe-3f9a2c-spectator0", "plpipe-3f9a2c-switch",
    )  # fmt: skip
    assert all(is_a_labs(name) for name in layout.namespaces)
    assert not is_a_labs("plpipe-host0")
    assert not is_a_labs("myplpipe-3f9a2c-host0")
    assert layout.address("spectator0") == "10.77.0.3"
    ports = {layout.traffic_port(a, b) for a in layout.hosts for b in layout.hosts}
    assert len(ports) == 9
    assert max(ports) < 29500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("lab run cluster=a -- fit recipe=b", ("lab run cluster=a", "fit recipe=b")),
        ("lab exec host1 -- sh -c -- true", ("lab exec host1", "sh -c -- true")),
        ("lab run cluster=a --", ("lab run cluster=a", "")),
        ("lab run cluster=a", ("lab run cluster=a", None)),
        ("fit -- recipe=b", ("fit -- recipe=b", None)),
    ],
)
def test_tokens_are_split_at_the_first_dashes(arguments: str, expected: tuple[str, str | None]) -> None:
    before, behind = split_at_dashes(arguments.split())
    assert (before, behind) == (expected[0].split(), None if expected[1] is None else expected[1].split())


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "labs"))
    return tmp_path / "labs"


def made(lab: str, owner: Owner | None) -> LabState:
    links = {"host0": Link(1e9, 1e-3, 0.1), "spectator0": Link()}
    return LabState(lab, ("host0",), ("spectator0",), 2, links, Link(1e10), owner)


def test_a_labs_file_says_all_about_it(noted: Path) -> None:
    me = Owner.this_process()
    written = made("aaa111", me)
    state.write(written)
    assert state.labs() == [written]
    assert state.find(None) == written
    assert not written.abandoned
    state.write(made("bbb222", Owner(me.pid, me.started - 60)))
    state.write(made("ccc333", None))
    assert {entry.lab: entry.abandoned for entry in state.labs()} == {"aaa111": False, "bbb222": True, "ccc333": False}
    with pytest.raises(LabError, match=r"3 labs stand here \(.*aaa111.*\); say which with --lab NAME"):
        state.find(None)
    with pytest.raises(LabError, match=r"there is no lab ddd444 here; those that stand: .*ccc333"):
        state.find("ddd444")
    for lab in ("aaa111", "bbb222", "ccc333"):
        state.forget(lab)
    assert list(noted.iterdir()) == []
    with pytest.raises(LabError, match="no lab stands on this machine; start one with"):
        state.find(None)


def test_a_cap_can_be_taken_off_again() -> None:
    before = Link(1e9, 1e-3)
    assert Link.of(LinkConfig(rate="uncapped"), name="host1", otherwise=before) == Link(None, 1e-3)
    assert Link.of(LinkConfig(rate=str(Link())), name="host1", otherwise=before).rate is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner": {"pid": "a", "started": 1.0}},
        {"owner": {"pid": 1, "started": None}},
        {"hosts": "host0"},
        {"hosts": [0]},
        {"links": {"host0": {"rate": "1gbit", "latency_s": 0, "loss": 0}}},
        {"since": "yesterday"},
        {"devices_per_host": True},
        {"flows": [{"flow": {"source": "host0", "target": "host1", "rate": 1}, "pids": ["a"]}]},
        {"lab": "ddd444"},
        {"links": {}, "inside": 3},
    ],
)
def test_a_file_with_other_things_than_a_lab_writes_is_damaged(
    noted: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state.write(made("bbb222", None))
    state.write(made("aaa111", Owner.this_process()))
    path = noted / "aaa111.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    assert [entry.lab for entry in state.labs()] == ["bbb222"]
    assert re.search(r"aaa111\.json is damaged .*remove the file and what `ip netns list` shows", caplog.text)


def test_traffic_whose_processes_have_ended_runs_no_more() -> None:
    flow = Flow("host0", "host1", 1e6)
    command = [sys.executable, "-I", str(Path(tools.__file__).with_name("traffic.py")), "receive", "127.0.0.1", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        assert RunningFlow(flow, (receiver.pid,)).runs
        assert not RunningFlow(flow, (receiver.pid, os.getpid())).runs, "another process that has the id now"
        receiver.kill()
        receiver.stdout.read()
        until_zombie = psutil.Process(receiver.pid)
        while until_zombie.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not RunningFlow(flow, (receiver.pid,)).runs
    assert not RunningFlow(flow, (receiver.pid,)).runs


def test_traffic_runs_while_its_process_becomes_another_program(tmp_path: Path) -> None:
    """As `ip netns exec` becomes Python: for a moment it has no words to be known by."""
    script = tmp_path / "traffic.py"
    script.write_text('exec sh "$0"\n')  # again and again
    flow = Flow("host0", "host1", 1e6)
    with subprocess.Popen(["sh", str(script)]) as becoming:
        try:
            assert all(RunningFlow(flow, (becoming.pid,)).runs for _ in range(2000))
        finally:
            becoming.kill()


def test_who_waits_for_another_command_can_give_up(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_LOCKED_WITHIN_S", 0.05)
    with state.locked():
        with pytest.raises(LabError, match=r"another command has been changing the labs in .*; end it"), state.locked():
            pytest.fail("two have the lock")
        with state.locked(give_up=lambda: True):
            pass


def test_a_tool_that_hangs_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_TIMEOUT_S", 0.05)
    with pytest.raises(LabError, match=r"sleep 20 has not ended within 0\.05 s and was killed; look"):
        tools.run("sleep", "20")


def test_a_process_whose_parent_has_died_already_does_not_begin() -> None:
    code = "from pl_pipe.lab.interruption import end_with_parent; end_with_parent({}); print('begun')"
    for parent, begins in ((os.getpid(), True), (os.getpid() + 1, False)):
        done = subprocess.run([sys.executable, "-c", code.format(parent)], capture_output=True, text=True, check=False)
        assert (done.returncode == 0, "begun" in done.stdout) == (begins, begins)


def test_a_signal_that_comes_while_a_process_is_forked_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that Python calls then drop what is raised in them."""

    def fork(*_: Any, **__: Any) -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("pl_pipe.lab.lab.subprocess.Popen", fork)
    lab = Lab(LabConfig(hosts=1))
    with pytest.raises(SystemExit), ending_by_exception():
        lab.start("host0", ["true"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_ends_with_a_command_that_is_interrupted_as_it_begins(number: signal.Signals) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "50"], start_new_session=True))
        os.kill(os.getpid(), number)
        return started[-1]

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        _waited_for(start, "sleep")
    assert started[0].poll() is not None


def test_signals_that_a_program_handles_or_ignores_stay_its_own() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ending_by_exception():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(SystemExit):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("text", ["{", json.dumps({"schema": 1}), json.dumps({"schema": 9})])
def test_a_damaged_file_is_named_and_hides_no_other(noted: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    noted.mkdir()
    (noted / "abc.json").write_text(text)
    state.write(made("aaa111", None))
    assert [entry.lab for entry in state.labs()] == ["aaa111"]
    assert re.search(r"abc\.json .*remove the file and what `ip netns list` shows", caplog.text)


def test_every_host_gets_its_number_its_interface_and_its_share_of_cores() -> None:
    lab = Lab(LabConfig(hosts=2, devices_per_host=3))
    command = " ".join(launcher(lab, "host1", ["-m", "pl_pipe", "fit", "recipe=vgg16"]))
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 3 --master-addr 10.77.0.1 --master-port 29500" in command
    assert command.endswith(f"--rdzv-id {lab.name} -m pl_pipe fit recipe=vgg16")
    environment = host_environment(lab, "host1", {}, cores=16)
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert environment["NCCL_HOSTID"] != host_environment(lab, "host0", {}, cores=16)["NCCL_HOSTID"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in host_environment(lab, "host1", {"OMP_NUM_THREADS": "4"}, cores=16)


def test_output_is_prefixed_and_kept_whole(tmp_path: Path) -> None:
    noise = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    text = b"first\n 10%\r 20%\r 30%\r" + noise + b"\nTraceback (most recent call last):\nthe last, without an end"
    said = copied(text, tmp_path, threading.Event())
    last = ["host0 | Traceback (most recent call last):", "host0 | the last, without an end"]
    assert said == ["host0 | first", "host0 |  10%", *last]
    assert (tmp_path / "host0.log").read_bytes() == text


def test_of_a_host_that_was_asked_to_stop_torchruns_complaints_are_only_kept(tmp_path: Path) -> None:
    warned = b"W1115 1 torch/distributed/elastic/agent: Received 15 death signal\n"
    text = warned + b"stopped: 6 steps\nTraceback (most recent call last):\n  x\nValueError: y\nsaved: last.ckpt\n"
    stopping = threading.Event()
    stopping.set()
    assert copied(text, tmp_path, stopping) == ["host0 | stopped: 6 steps", "host0 | saved: last.ckpt"]
    assert (tmp_path / "host0.log").read_bytes() == text


CAUSE = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     step()
[rank1]: ValueError: a cause
"""
CONSEQUENCES = """\
Traceback (most recent call last):
  File "run.py", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_22:00:00
  rank      : 1 (local_rank: 0)
  exitcode  : -9 (pid: 4711)
============================================================
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 3, in <module>
[rank2]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer
after it
"""


def test_a_cause_is_said_whole_and_what_follows_from_it_in_a_line(tmp_path: Path) -> None:
    said = copied((CAUSE + CONSEQUENCES).encode(), tmp_path, threading.Event())
    shortened = [
        "rank 1 was ended by signal 9 (SIGKILL)",
        "[rank2]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer",
        "after it",
    ]
    assert said == [f"host0 | {line}" for line in [*CAUSE.splitlines(), *shortened]]
    assert (tmp_path / "host0.log").read_text() == CAUSE + CONSEQUENCES


def test_hosts_are_asked_to_stop_though_nothing_can_be_said() -> None:
    def say(_: str) -> None:
        raise BrokenPipeError

    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(BrokenPipeError):
            rehearsal._stop({"host0": process}, say)
        assert process.wait(20) == -signal.SIGTERM


def copied(text: bytes, folder: Path, stopping: threading.Event) -> list[str]:
    said: list[str] = []
    copy_output(io.BufferedReader(io.BytesIO(text)), folder / "host0.log", "host0 | ", said.append, stopping)  # type: ignore[arg-type]
    return said


def test_what_a_machine_lacks_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(tools.os, "geteuid", lambda: 1000)
    assert "only root may (user id 1000); run sudo -E /bin/pl-pipe lab" in (tools.unavailable() or "")
    monkeypatch.setattr(tools.os, "geteuid", lambda: 0)
    assert tools.unavailable() is None
    monkeypatch.setattr(tools.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert "needs the command tc, which is not here; install iproute2" in (tools.unavailable() or "")
    monkeypatch.setattr(tools.sys, "platform", "darwin")
    assert "use a Linux machine" in (tools.unavailable() or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run cluster=lab_4x1_1gbit", "there is no command to run in the lab; put one behind --"),
        ("run cluster=lab_4x1_1gbit fit recipe=vgg16", "put one behind --"),
        ("run fit cluster=lab_4x1_1gbit -- fit", "'fit' is no setting of a lab"),
        ("run -- fit", "cluster=local describes no lab; choose cluster=NAME of lab_2x2_two_level, lab_4x1_1gbit"),
        ("run cluster=lab_none -- fit", "Could not find 'cluster/lab_none'"),
        ("run cluster=lab_4x1_1gbit cluster.lab.hosst=2 -- fit", "Key 'hosst' not in 'LabConfig'"),
        ("run cluster=lab_4x1_1gbit cluster.lab.between.rate=1 -- fit", "between.rate=1 is no rate"),
        ("run cluster=lab_4x1_1gbit -- plan", "'plan' cannot run in a lab; give one of fit, validate, test, predict"),
        ("run cluster=lab_4x1_1gbit -- fit trainer.devices=4", "but the lab has 4 host(s) of 1 device(s); leave both"),
        ("run cluster=lab_2x2_two_level -- fit trainer.num_nodes=1", "trainer.devices=2 trainer.num_nodes=1, but"),
        ("run cluster=lab_4x1_1gbit -- fit recipe=none", "Could not find 'recipe/none'"),
        ("run cluster=lab_4x1_1gbit -- fit -m seed=1,2", "-m sweeps cannot run inside one torchrun job"),
        (
            "run cluster=lab_4x1_1gbit -- fit recipe=vgg16 strategy=single",
            "strategy=single trains on 1 device, this run has 1 on each of 4 node(s); choose a lab of one host",
        ),
        (
            "run cluster=lab_4x1_1gbit -- fit recipe=recorded strategy=ddp",
            "recipe.profile is not set; give the profile",
        ),
        (
            "run cluster=lab_4x1_1gbit -- fit recipe=recorded recipe.profile=no.txt strategy=ddp",
            "recipe.profile=no.txt is no file; give a graph.txt",
        ),
        (
            f"run cluster=lab_4x1_1gbit -- fit recipe=recorded recipe.profile={Path(__file__).parents[1]}/LICENSE "
            "strategy=ddp",
            "graph.txt line 1 cannot be read",
        ),
        (
            "run cluster=lab_4x1_1gbit -- fit recipe=vgg16 strategy=pipedream strategy.plan=no.json",
            "strategy.plan=no.json does not exist; give a file of pl-pipe plan",
        ),
        ("run cluster=lab_4x1_1gbit -- python none.py", "none.py does not exist here; give the path"),
        ("run cluster=lab_4x1_1gbit -- python -c pass", "'-c' is no Python program; give python train.py or python -m"),
        ("run cluster=lab_4x1_1gbit -- python", "'python' is no Python program"),
        ("exec host1", "there is no program to run; put one behind --"),
        ("set-link host1 rate=1gbit", "no lab stands on this machine"),
        ("set-link host1 speed=1gbit", "'speed=1gbit' is no setting of a link here; give rate=…, latency=…, loss=…"),
        ("traffic host0 host1 300mbit", "'300mbit' is no setting of a link here; give rate=…"),
        ("down", "no lab stands"),
        ("clean abc", "there is no lab abc here"),
    ],
)
def test_commands_are_refused_before_anything_is_set_up(
    inside: Inside, noted: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr(tools, "unavailable", lambda: None)
    monkeypatch.setattr(tools, "_run", lambda *_: pytest.fail("something was set up"))
    code, _, err = inside("lab", *arguments.split())
    assert code == 1
    assert message in " ".join(err.split())
    assert not list(noted.glob("*"))


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("lab:\n  hosts: [2\n  between: {rate: 1gbit}\n", ["mine.yaml", "line 3"]),
        ("lab:\n  hosts: 2\n  between: 1gbit\n", ["write between: {rate: 1gbit}"]),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_few_lines(
    inside: Inside, noted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, messages: list[str]
) -> None:
    monkeypatch.setattr(tools, "unavailable", lambda: None)
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    (tmp_path / "own" / "cluster" / "mine.yaml").write_text(content)
    code, _, err = inside("lab", "up", "cluster=mine", "--config-dir", str(tmp_path / "own"))
    assert code == 1
    assert "Traceback" not in err
    assert len(err.splitlines()) < 15
    assert all(message in " ".join(err.split()) for message in messages), err


@pytest.mark.parametrize(
    ("given", "program"),
    [
        ("python train.py --lr 1", "train.py --lr 1"),
        ("train.py a=1", "train.py a=1"),
        ("python3.11 -m pkg x", "-m pkg x"),
    ],
)
def test_a_program_of_ones_own_is_torchruns_to_start(
    given: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert program_of(given.split(), RehearsedCluster.of(LabConfig()), []) == program.split()


def test_workers_come_and_go_within_the_limits_of_the_lab() -> None:
    program = ["-m", "pl_pipe", "fit", "recipe=resnet18", "data=synthetic", "strategy=adaptive", "policy=provision"]
    assert elastic_limits(program, RehearsedCluster.of(LabConfig(hosts=4))) == (1, 4, 1)
    given = [*program, "policy.provision.command='./workers.sh {workers}'"]  # as the documents have it
    assert elastic_limits(given, RehearsedCluster.of(LabConfig(hosts=4))) == (1, 4, 1)
    scheduled = [*program, "policy.provision.schedule=[2:10,3:5]"]
    assert elastic_limits(scheduled, RehearsedCluster.of(LabConfig(hosts=4))) == (1, 4, 2)
    assert elastic_limits(program[:-1], RehearsedCluster.of(LabConfig(hosts=4, devices_per_host=2))) is None
    for wrong, words in (
        ("least=0", "least=0 and most=4 workers contradict each other"),
        ("schedule=[2:10,6:5]", r"the schedule has 6 worker\(s\), and the limits are 1 to 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            elastic_limits([*program, f"policy.provision.{wrong}"], RehearsedCluster.of(LabConfig(hosts=4)))
    for config, words in (
        (LabConfig(hosts=3), r"up to 4 workers, the lab has 3 host\(s\); set most=3"),
        (LabConfig(hosts=4, devices_per_host=2), "hosts have 2 devices each, which come and go together"),
    ):
        with pytest.raises(ConfigError, match=words):
            elastic_limits(program, RehearsedCluster.of(config))


def test_without_root_every_command_that_needs_it_says_so(
    inside: Inside, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools.shutil, "which", lambda tool: f"/bin/{tool}")
    for arguments in (
        "run cluster=lab_4x1_1gbit -- fit",
        "up cluster=lab_4x1_1gbit",
        "down",
        "clean",
        "set-link host1 rate=1gbit",
    ):
        code, _, err = inside("lab", *arguments.split())
        assert (code, "only root may (user id 1000)" in err) == (1, True), arguments
    code, out, _ = inside("lab", "status")
    assert (code, out.strip()) == (0, "no lab stands on this machine")
    assert os.environ[state.FOLDER_VARIABLE] == str(noted)


@pytest.mark.parametrize("error", [SystemExit(1), BrokenPipeError()])
def test_a_host_is_heard_to_its_end_though_nobody_reads(tmp_path: Path, error: BaseException) -> None:
    """Else its pipe would fill, and the training stand still."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        raise error

    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    source = io.BufferedReader(io.BytesIO(lines))  # type: ignore[arg-type]
    copy_output(source, tmp_path / "host0.log", "host0 | ", say, threading.Event())
    assert said == ["host0 | line 0"]
    assert (tmp_path / "host0.log").read_bytes() == lines


def test_a_host_is_heard_though_its_file_cannot_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    source = io.BufferedReader(io.BytesIO(b"one\ntwo\n"))  # type: ignore[arg-type]
    copy_output(source, tmp_path / "absent" / "host0.log", "", said.append, threading.Event())
    assert said[1:] == ["one", "two"]
    assert "host0.log is not written on" in said[0]


def test_an_owner_lives_on_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Owner.this_process()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    assert me.alive
    assert not replace(me, started=me.started + 1).alive
    assert not Owner(2**22 + 1, me.started).alive


def test_a_policy_that_an_experiment_brings_is_seen(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /policy: provision\n"
    )
    program = ["-m", "pl_pipe", "fit", "experiment=mine", "strategy=adaptive", f"--config-dir={tmp_path}"]
    assert elastic_limits(program, RehearsedCluster.of(LabConfig(hosts=4))) == (1, 4, 1)
