"""Labs of real network namespaces, where there are root and iproute2: what they do, and that they leave nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pl_pipe.cluster import LabConfig, Link, LinkConfig
from pl_pipe.errors import ConfigError, LabError
from pl_pipe.lab import Lab, namespaces, rehearsal, remove_abandoned, state, unavailable
from tests.conftest import TIMEOUT_S, TINY, marked_processes, only_run

REASON = unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no labs on this machine: {REASON}"),
]

MARK = "PL_PIPE_TEST_MARK"
PL_PIPE = str(Path(sys.executable).parent / "pl-pipe")
TWO = LabConfig(hosts=2, between=LinkConfig(rate="1gbit"))
RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7000)).sendall(bytes(int(sys.argv[2])))"
RUN = ("lab", "run", "cluster=lab_4x1_1gbit", "cluster.lab.hosts=2", "--", "fit", *TINY[:-1], "strategy=pipedream")


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def surroundings() -> tuple[str, ...]:
    """The machine's own network, as far as a lab could change it."""
    forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    return tool("ip", "-br", "link"), tool("ip", "route"), tool("ip", "rule"), tool("tc", "qdisc"), forwarding


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: None) -> Iterator[None]:
    """Each test has a folder of labs of its own, and fails if it leaves a namespace, a process or a file."""
    folder, mark = tmp_path / "labs", os.urandom(8).hex()
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(MARK, mark)
    before, names = surroundings(), spaces()
    yield
    files = list(folder.glob("*"))
    processes = [process for process in marked_processes(mark) if process.pid != os.getpid()]
    left = spaces() - names
    for entry in state.labs():
        Lab.open(entry.lab).down()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert (left, files, processes) == (set(), [], [])
    assert surroundings() == before


def spaces() -> set[str]:
    """Namespaces of labs, but for those of the machine's own: somebody may rehearse something meanwhile."""
    others = {path.stem for path in Path(state.FOLDER).glob("*.json")}
    found = {line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.startswith("plpipe-")}
    return {name for name in found if not any(other in name for other in others)}


def until(condition: Callable[[], object], what: str, seconds: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.1)


def python(lab: Lab, host: str, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return lab.start(host, [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def transfer(lab: Lab, source: str, target: str, size: int) -> None:
    """`size` bytes by TCP from one host to another."""
    receiver = python(lab, target, RECEIVE, lab.layout.address(target))
    assert receiver.stdout is not None
    receiver.stdout.readline()
    assert python(lab, source, SEND, lab.layout.address(target), str(size)).wait(60) == 0
    assert receiver.wait(60) == 0


def test_hosts_reach_each_other_over_their_links_alone() -> None:
    with Lab(
        LabConfig(hosts=2, between=LinkConfig(rate="1gbit"), inside=LinkConfig(rate="5gbit"), spectators=1)
    ) as lab:
        assert spaces() >= set(lab.layout.namespaces)
        before = lab.transferred()
        transfer(lab, "host0", "host1", 3_000_000)
        after = lab.transferred()
        assert after["host0"][0] - before["host0"][0] > 3_000_000
        assert after["host1"][1] - before["host1"][1] > 3_000_000
        assert after["spectator0"][1] - before["spectator0"][1] < 100_000
        transfer(lab, "host0", "host0", 3_000_000)
        assert lab.transferred()["host0"][0] - after["host0"][0] < 100_000, "a host's own traffic is inside it"
        for name, device in ((lab.layout.namespace("host0"), "eth0"), (lab.layout.switch, "host0")):
            assert "rate 1Gbit" in tool("tc", "-n", name, "qdisc", "show", "dev", device)
        assert "rate 5Gbit" in tool("tc", "-n", lab.layout.namespace("host0"), "qdisc", "show", "dev", "lo")
        outside = python(lab, "host0", "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)")
        assert outside.wait(30) != 0, "a lab must not reach the machine's network"


def test_links_and_traffic_change_while_it_stands() -> None:
    with Lab(TWO) as lab, Lab(TWO) as other:
        assert len(spaces() & {*lab.layout.namespaces, *other.layout.namespaces}) == 6, "two labs at once"
        Lab.open(lab.name).set_link("host1", LinkConfig(rate="100mbit"))
        for name, device in ((lab.layout.namespace("host1"), "eth0"), (lab.layout.switch, "host1")):
            assert "rate 100Mbit" in tool("tc", "-n", name, "qdisc", "show", "dev", device)
        assert "rate 1Gbit" in tool("tc", "-n", other.layout.switch, "qdisc", "show", "dev", "host1")
        assert state.find(lab.name).links["host1"].rate == 1e8
        with pytest.raises(
            ConfigError, match="set-link names host7, which the lab has not; its hosts are host0, host1"
        ):
            lab.set_link("host7", LinkConfig(rate="1gbit"))
        Lab.open(lab.name).set_traffic("host0", "host1", "80mbit")
        until(lambda: lab.transferred()["host1"][1] > 1_000_000, "traffic")
        assert other.transferred()["host1"][1] < 100_000
        lab.set_traffic("host0", "host1", "10mbit")
        (flow,) = state.find(lab.name).flows
        assert flow.flow.rate == 1e7
        lab.set_traffic("host0", "host1", "0")
        until(lambda: not namespaces.processes_in(lab.layout.namespaces), "the end of the traffic")
        with pytest.raises(ConfigError, match="no traffic from host0 to host1 to end; the lab's traffic: none"):
            lab.set_traffic("host0", "host1", "0")


def test_a_link_whose_change_is_refused_is_as_before() -> None:
    """As `rate=1mbit latency=5ms` where the kernel has no netem: tc deletes, caps, and then knows no more."""
    real = namespaces.shaping.commands

    def half_way(link: Link, *, device: str, **options: Any) -> list[str]:
        lines = real(Link(link.rate), device=device, **options)
        if link.disturbed:
            lines = [f"qdisc del dev {device} root", *lines]
            if device == refusing:
                lines.append(f"qdisc add dev {device} parent 1:1 handle 10: nonsense")
        return lines

    with Lab(TWO) as lab, pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces.shaping, "commands", half_way)
        ends = ((lab.layout.namespace("host1"), "eth0"), (lab.layout.switch, "host1"))
        for refusing in ("eth0", "host1"):  # noqa: B007
            with pytest.raises(LabError, match="nonsense"):
                lab.set_link("host1", LinkConfig(rate="1mbit", latency="5ms"))
            for name, device in ends:
                assert "rate 1Gbit" in tool("tc", "-n", name, "qdisc", "show", "dev", device)
            assert state.find(lab.name).links["host1"] == Link(1e9)
        lab.set_link("host1", LinkConfig(rate="uncapped"))
        for name, device in ends:
            assert "tbf" not in tool("tc", "-n", name, "qdisc", "show", "dev", device)


def test_traffic_that_ends_is_seen_and_traffic_that_cannot_start_is_refused() -> None:
    with Lab(TWO) as lab:
        lab.set_traffic("host0", "host1", "10mbit")
        (before,) = state.find(lab.name).flows
        assert before.runs
        os.kill(before.pids[1], signal.SIGKILL)
        until(lambda: not before.runs, "the end of the receiver")
        assert f"10mbit has ended by itself; see {state.traffic_log(lab.name)}" in tool(PL_PIPE, "lab", "status")
        lab.set_traffic("host0", "host1", "20mbit")
        (after,) = state.find(lab.name).flows
        assert after.runs
        until(lambda: lab.transferred()["host1"][1] > 100_000, "traffic")
        lab.set_traffic("host0", "host1", "30mbit")  # at once, on the port of the last
        assert state.find(lab.name).flows[0].runs
        lab.set_traffic("host0", "host1", "0mbit")
        assert not namespaces.processes_in(lab.layout.namespaces)
        with pytest.raises(ConfigError, match="traffic names nope, which the lab has not; its hosts are host0, host1"):
            lab.set_traffic("host0", "nope", "0")
        port = str(lab.layout.traffic_port("host0", "host1"))
        taken = python(lab, "host1", RECEIVE.replace("7000", port), lab.layout.address("host1"))
        assert taken.stdout is not None
        taken.stdout.readline()
        with pytest.raises(LabError, match=r"host0 > host1: 10mbit does not start: OSError.*Address already in use"):
            lab.set_traffic("host0", "host1", "10mbit")
        assert not state.find(lab.name).flows


def test_the_end_of_traffic_ends_nobody_elses_process() -> None:
    """Of a sender that died, the system may give the id to another process."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Lab(TWO) as lab:
            lab.set_traffic("host0", "host1", "10mbit")
            found = state.find(lab.name)
            state.write(replace(found, flows=tuple(replace(flow, pids=(stranger.pid,)) for flow in found.flows)))
            lab.set_traffic("host0", "host1", "0")
            assert not state.find(lab.name).flows
            time.sleep(0.3)
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()


def test_a_lab_that_cannot_be_finished_is_removed() -> None:
    """Half-way through, `tc` is asked for something it does not know."""
    before = spaces()
    lab = Lab(LabConfig(hosts=2, between=LinkConfig(rate="1gbit"), inside=LinkConfig(rate="1gbit")))
    broken = [*namespaces.shaping.commands(Link(1e9), device="eth0"), "qdisc add dev eth0 root nonsense"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces.shaping, "commands", lambda *_, **__: broken)
        with pytest.raises(LabError, match=r"tc -n plpipe-.* qdisc add dev eth0 root nonsense failed \("), lab:
            pytest.fail("it was set up")
    assert spaces() == before
    with Lab(TWO) as standing:
        with pytest.raises(RuntimeError), Lab(TWO):
            raise RuntimeError
        assert spaces() - before == set(standing.layout.namespaces)


def test_the_first_host_that_fails_gives_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {"host0": "echo here; sleep 600", "host1": "echo there; exit 3"}
    monkeypatch.setattr(rehearsal, "launcher", lambda _lab, host, _command: ["sh", "-c", scripts[host]])
    monkeypatch.setattr(rehearsal, "_OTHERS_END_WITHIN_S", 0.5)
    said: list[str] = []
    with Lab(TWO) as lab:
        assert rehearsal.rehearse(lab, ["fit"], folder=tmp_path, say=said.append) == 3
        assert {"host0 | here", "host1 | there"} <= set(said)
        scripts["host0"], scripts["host1"] = "sleep 600", "kill -9 $$"
        assert rehearsal.rehearse(lab, ["fit"], folder=tmp_path, say=said.append) == 128 + 9
        assert (
            "host1's launcher was ended by signal 9 (SIGKILL); ending in 0.5 s unless they do so before: host0" in said
        )
        scripts["host0"] = "exit 0"
        scripts["host1"] = "exit 0"
        assert rehearsal.rehearse(lab, ["fit"], folder=tmp_path, say=said.append) == 0
    assert (tmp_path / "host1.log").read_text() == ""


def test_a_run_in_the_lab_ends_well_and_leaves_its_results(tmp_path: Path) -> None:
    done = subprocess.run(
        [PL_PIPE, *RUN, "trainer.max_epochs=1", "strategy.plan=straight"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host0 | a pipeline of 2 stages" in done.stdout
    assert "was not measured" not in done.stdout, "the plan did not count on the lab's links"
    assert "GLOBAL_RANK: 0" in (hosts_output(tmp_path) / "host0.log").read_text()
    assert "GLOBAL_RANK: 1" in (hosts_output(tmp_path) / "host1.log").read_text()
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["status"], summary["hardware"]["num_nodes"], summary["steps"]) == ("finished", 2, 6)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("over the links: host0 sent ")]
    assert " MB" in line or " kB" in line


TRAINING = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = [torch.zeros(1, 4) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
print(sys.argv[1], dist.get_rank(), torch.equal(*weights), flush=True)
dist.destroy_process_group()
"""


def test_a_program_of_ones_own_trains_in_the_lab(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    lab = ("lab", "run", "cluster=lab_4x1_1gbit", "cluster.lab.hosts=2")
    done = subprocess.run(
        [PL_PIPE, *lab, "--", "python", "train.py", "--alike"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host0 | --alike 0 True" in done.stdout
    assert "host1 | --alike 1 True" in done.stdout


ENTERED = """
import time
from pl_pipe.cluster import LabConfig
from pl_pipe.lab import Lab
with Lab(LabConfig(hosts=1)):
    print("stands", flush=True)
    time.sleep(600)
"""


def test_a_lab_made_from_python_is_removed_on_sigterm_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENTERED]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        run.stdout.readline()
        assert state.labs()
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM


def hosts_output(root: Path) -> Path:
    (folder,) = (root / "outputs" / "lab").iterdir()
    return folder


def _with_usual_signals() -> None:
    """Tests may run under nohup, or behind a shell's `&`, which ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def started(tmp_path: Path) -> "subprocess.Popen[str]":
    command = [PL_PIPE, *RUN, "trainer.max_epochs=100000", "strategy.plan=straight"]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=_with_usual_signals,
    )  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_stops_the_training_and_removes_the_lab(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        until(lambda: list(tmp_path.rglob("last.ckpt")), "the first checkpoint")
        lab = state.find(None)
        tool(PL_PIPE, "lab", "set-link", "host1", "rate=50mbit")
        assert "rate 50Mbit" in tool("tc", "-n", lab.layout.switch, "qdisc", "show", "dev", "host1")
        tool(PL_PIPE, "lab", "traffic", "host0", "host1", "rate=20mbit")
        shown = " ".join(tool(PL_PIPE, "lab", "status").split())
        assert lab.lab in shown
        assert "50mbit" in shown
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 128 + 2, out
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_remove_the_lab_too(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as run:
        until(lambda: state.labs() and namespaces.processes_in(state.labs()[0].layout.namespaces), "processes")
        run.send_signal(number)
        run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 128 + number


def test_after_a_kill_the_lab_is_abandoned_and_the_next_one_removes_it(tmp_path: Path) -> None:
    names = []
    for remove in (lambda: tool(PL_PIPE, "lab", "clean"), remove_abandoned):
        with started(tmp_path) as run:
            until(lambda: state.labs() and namespaces.processes_in(state.labs()[0].layout.namespaces), "processes")
            run.kill()
        (entry,) = state.labs()
        assert entry.abandoned
        assert "abandoned" in " ".join(tool(PL_PIPE, "lab", "status").split())
        names.append(entry.lab)
        assert entry.lab in remove()
        assert state.labs() == []
    assert len(set(names)) == 2


def test_a_lab_that_was_set_up_stays_until_it_is_taken_down(tmp_path: Path) -> None:
    up = tool(PL_PIPE, "lab", "up", "cluster=lab_4x1_1gbit", "cluster.lab.hosts=2")
    name = up.split()[-1]
    assert "nothing to remove" in tool(PL_PIPE, "lab", "clean"), "it is not abandoned"
    shown = tool(PL_PIPE, "lab", "exec", "host1", "--lab", name, "--", "ip", "-br", "address", "show", "eth0")
    assert "10.77.0.2/24" in shown
    failed = subprocess.run(
        [PL_PIPE, "lab", "exec", "host0", "--", "sh", "-c", "exit 7"], timeout=TIMEOUT_S, check=False
    )
    assert failed.returncode == 7
    deaf = subprocess.Popen(
        [PL_PIPE, "lab", "exec", "host0", "--", "sh", "-c", "trap '' TERM; echo up; while true; do sleep 1; done"],
        stdout=subprocess.PIPE, text=True, preexec_fn=_with_usual_signals,
    )  # fmt: skip
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == "up\n"
    deaf.send_signal(signal.SIGINT)
    said, _ = deaf.communicate(timeout=TIMEOUT_S)  # to the end: nothing that it started holds the pipe any more
    assert "sh was asked to end 5 s ago; killing it" in said
    assert name in tool(PL_PIPE, "lab", "down")
