"""Measured links become a cluster; ranks that fail are named, and none is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from conftest import TIMEOUT_S, marked_processes

from pl_pipe.cluster import Launch, Level, read_cluster
from pl_pipe.errors import ConfigError, RunError
from pl_pipe.profiling import watched_ranks
from pl_pipe.profiling.link_probe import SIZES_BYTES as SIZES
from pl_pipe.profiling.link_probe import Place, distinct_hosts, groups_to_reduce, measure_links, pairs_to_measure
from pl_pipe.profiling.link_report import (
    AllReduceTimings,
    LinkReport,
    PairTimings,
    Timing,
    cluster_of,
    fit_link,
    write_cluster,
)
from pl_pipe.profiling.link_timing import Effort
from pl_pipe.profiling.probe_processes import choose_means, probe_launched, probe_local, slurm_address

SMALL = (4096, 65536, 1 << 20)
CAP = 25e6  # 200 Mbit/s


# --- the line through a link's timings


def line(bandwidth: float, latency_s: float, *, noise: float = 0.0) -> tuple[Timing, ...]:
    """Timings of a link that is exactly so fast, with quartiles `noise` to either side."""
    exact = [(size, latency_s + size / bandwidth) for size in SIZES]
    return tuple(Timing(size, seconds, seconds * (1 - noise), seconds * (1 + noise), 9) for size, seconds in exact)


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(25e6, 1e-4), (1.25e9, 2e-5), (3e11, 5e-6), (1e8, 0.0)])
def test_a_straight_line_is_recovered(bandwidth: float, latency_s: float) -> None:
    fit = fit_link(line(bandwidth, latency_s, noise=0.1))
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert fit.bandwidth_spread == pytest.approx((bandwidth / 1.1, bandwidth / 0.9), rel=1e-6)
    assert fit.latency_spread_s[0] <= fit.latency_s <= fit.latency_spread_s[1]


def test_one_disturbed_size_does_not_decide_the_bandwidth() -> None:
    for disturbed in range(4, 7):
        timings = list(line(1e9, 1e-4))
        slow = timings[disturbed].median_s * 3
        timings[disturbed] = Timing(SIZES[disturbed], slow, slow, slow, 9)
        assert fit_link(timings).bandwidth == pytest.approx(1e9, rel=0.15)


def test_sizes_that_are_mostly_latency_do_not_decide_the_bandwidth() -> None:
    """A slow link is spared large messages; on a busy machine its small ones have waited for the processor."""
    seconds = {4096: 2.0e-3, 16384: 1.9e-3, 65536: 2.7e-3, 262144: 10.6e-3}
    fit = fit_link([Timing(size, time, time, time, 5) for size, time in seconds.items()])
    assert fit.bandwidth == pytest.approx(25e6, rel=0.02)


def test_small_messages_that_pass_in_a_burst_still_show_their_latency() -> None:
    """A rate limiter of 25 MB/s lets the first 64 KiB through at once; 4 KiB would take 164 us at its rate."""
    burst = tuple(
        Timing(size, seconds, seconds, seconds, 9)
        for size in SIZES
        for seconds in [5e-5 + size / 1e9 + max(size - 65536, 0) / 25e6]
    )
    fit = fit_link(burst)
    assert fit.latency_s == pytest.approx(5e-5, rel=1e-6)
    assert fit.bandwidth == pytest.approx(25e6, rel=0.03)


def test_times_that_fall_with_size_give_a_rate_all_the_same() -> None:
    timings = (Timing(4096, 2e-3, 2e-3, 2e-3, 3), Timing(16384, 1e-3, 1e-3, 1e-3, 3))
    assert fit_link(timings).bandwidth == pytest.approx(16384 / 1e-3)
    assert fit_link(timings).latency_s == pytest.approx(2e-3)


# --- from a report to a cluster


def report_of(hosts: str, *, inside: Level, between: Level) -> LinkReport:
    """A report of ranks on hosts of one letter each (`aabb`), whose links follow the two levels exactly."""

    def link(ranks: tuple[int, ...]) -> Level:
        return inside if len({hosts[rank] for rank in ranks}) == 1 else between

    def reduced(ranks: tuple[int, ...]) -> AllReduceTimings:
        seconds = [(size, link(ranks).all_reduce_s(size, len(ranks))) for size in SIZES]
        return AllReduceTimings(ranks, tuple(Timing(size, time, time, time, 9) for size, time in seconds))

    return LinkReport(
        hosts=tuple(hosts),
        backend="gloo",
        device="cpu",
        torch_version="2.10",
        pairs=tuple(
            PairTimings(pair, line(link(pair).bandwidth, link(pair).latency_s)) for pair in pairs_to_measure(hosts)
        ),
        all_reduces=tuple(reduced(ranks) for ranks in groups_to_reduce(hosts)),
    )


INSIDE = Level(2, 1.25e10, 5e-6, 2.5)
BETWEEN = Level(2, 1.25e9, 5e-5, 3.0)


@pytest.mark.parametrize(
    ("hosts", "levels"),
    [
        ("aa", [(2, INSIDE)]),
        ("aaaa", [(4, INSIDE)]),
        ("abc", [(3, BETWEEN)]),
        ("aabb", [(2, INSIDE), (2, BETWEEN)]),
        ("aaaabbbbcccc", [(4, INSIDE), (3, BETWEEN)]),
        ("a" * 64 + "b" * 64, [(64, INSIDE), (2, BETWEEN)]),
    ],
)
def test_levels_are_recovered(hosts: str, levels: list[tuple[int, Level]]) -> None:
    cluster = cluster_of(report_of(hosts, inside=INSIDE, between=BETWEEN))
    assert cluster.workers == len(hosts)
    for found, (members, level) in zip(cluster.levels, levels, strict=True):
        assert found.members == members
        assert found.bandwidth == pytest.approx(level.bandwidth, rel=1e-6)
        assert found.latency_s == pytest.approx(level.latency_s, rel=1e-6)
        assert found.all_reduce_factor == pytest.approx(level.all_reduce_factor, rel=1e-6)


def test_ranks_that_levels_cannot_describe_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host a has ranks \[0, 2\], which are not neighbours; number the ranks"):
        cluster_of(report_of("abab", inside=INSIDE, between=BETWEEN))
    with pytest.raises(ConfigError, match=r"different numbers of ranks \(a: 3, b: 1\); start as many on each"):
        cluster_of(report_of("aaab", inside=INSIDE, between=BETWEEN))


def test_an_absurd_all_reduce_is_clamped_aloud(caplog: pytest.LogCaptureFixture) -> None:
    slow = Level(2, 1e9, 1e-5, all_reduce_factor=500.0)
    assert cluster_of(report_of("aa", inside=slow, between=slow)).levels[0].all_reduce_factor == 64.0
    assert "measured a factor of 500" in caplog.text


def test_cluster_file_can_be_read_back(tmp_path: Path) -> None:
    report = report_of("aabb", inside=INSIDE, between=BETWEEN)
    cluster = cluster_of(report)
    path = tmp_path / "made" / "cluster.json"
    write_cluster(report, cluster, path)
    assert read_cluster(path) == cluster
    assert [file.name for file in path.parent.iterdir()] == ["cluster.json"]  # nothing temporary is left
    content = json.loads(path.read_text())
    assert {(*pair["ranks"], pair["level"]) for pair in content["pairs"]} == {
        (0, 1, 0),
        (2, 3, 0),
        *((first, second, 1) for first in (0, 1) for second in (2, 3)),
    }
    first = content["pairs"][0]
    assert first["seconds"]["4096"] == pytest.approx(5e-6 + 4096 / 1.25e10)
    assert set(first) == {"ranks", "level", "seconds", "bandwidth", "latency_s", "spread"}
    assert [entry["level"] for entry in content["all_reduce"]] == [1, 0, 0]
    assert (content["backend"], content["device"], content["torch_version"]) == ("gloo", "cpu", "2.10")
    assert content["hosts"] == list("aabb")


def test_a_file_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    report = report_of("aa", inside=INSIDE, between=BETWEEN)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder cannot be written: .*; choose another file"):
        write_cluster(report, cluster_of(report), tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


# --- what is measured


def test_all_pairs_of_few_ranks_and_a_sample_of_many() -> None:
    assert pairs_to_measure("aabb") == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert len(pairs_to_measure("a" * 8)) == 28
    nine = pairs_to_measure("aaabbbccc")
    assert {(rank, rank + 1) for rank in range(8)} | {(0, 8), (0, 3), (0, 6), (3, 6)} <= set(nine)
    hosts = [f"host{rank // 8}" for rank in range(1024)]
    many = pairs_to_measure(hosts)
    assert len(many) <= 3 * 48
    assert all(0 <= first < second < 1024 for first, second in many)
    assert {hosts[first] == hosts[second] for first, second in many} == {True, False}
    assert many == pairs_to_measure(hosts)


def test_hosts_are_told_apart_by_namespace_only_where_they_must() -> None:
    assert distinct_hosts([Place("n0", "net:[1]"), Place("n1", "net:[1]")]) == ["n0", "n1"]
    assert distinct_hosts([Place("n0", "net:[1]"), Place("n0", "net:[1]")]) == ["n0", "n0"]
    assert distinct_hosts([Place("n0", "net:[1]"), Place("n0", "net:[2]")]) == ["n0/net:[1]", "n0/net:[2]"]


def test_slow_links_are_spared_large_messages() -> None:
    effort = Effort(SIZES, repeats=30, budget_s=1.0)
    assert effort.affords(1, pace_s=9.0, left_s=0.0)  # a line needs two points
    assert effort.affords(7, pace_s=0.04, left_s=0.8)
    assert not effort.affords(7, pace_s=0.04, left_s=0.7)
    assert effort.rounds(0, pace_s=1e-4, left_s=1.0) == 30
    assert effort.rounds(6, pace_s=0.01, left_s=1.0) == 10
    assert effort.rounds(7, pace_s=0.05, left_s=1.0) == 20
    assert effort.rounds(7, pace_s=5.0, left_s=1.0) == 3


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 rank\(s\) have no link to measure; set trainer.devices=2"):
        probe_local(1)
    with pytest.raises(ConfigError, match=r"1 rank\(s\) have no link to measure; set trainer.devices=2"):
        probe_launched(Launch("torchrun", "job", 0, 1, 1))
    with pytest.raises(ConfigError, match=r"sizes \[4096\] are not two or more rising multiples of 4 bytes"):
        probe_local(2, sizes=(4096,))
    with pytest.raises(ConfigError, match=r"repeats=0 .* leave nothing to measure"):
        probe_local(2, repeats=0)
    with pytest.raises(ConfigError, match="there is no process group"):
        measure_links()


def test_means_follow_the_devices() -> None:
    assert choose_means("cpu", local_ranks=4, cuda_devices=8).backend == "gloo"
    assert choose_means("cuda", local_ranks=4, cuda_devices=4).backend == "nccl"
    shared = choose_means("cuda", local_ranks=2, cuda_devices=1)
    assert (shared.backend, shared.device) == ("gloo", "cpu")
    assert shared.remark.startswith("2 ranks share 1 CUDA device(s): measured with gloo")
    assert choose_means("cuda", local_ranks=2, cuda_devices=2, backend="gloo").remark.startswith("gloo was asked for")
    for device, cuda, backend, message in [
        ("cuda", 0, None, "device=cuda, but torch sees no CUDA device here; set trainer.accelerator=cpu"),
        ("cuda", 1, "nccl", r"this machine has 1 for 2 ranks; start fewer ranks"),
        ("cpu", 1, "nccl", r"backend=nccl cannot send from device=cpu"),
        ("tpu", 0, None, r"device=tpu cannot be probed"),
        ("cpu", 0, "mpi", r"backend=mpi cannot be probed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            choose_means(device, local_ranks=2, cuda_devices=cuda, backend=backend)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[07-09,12]", "n07"), ("n[3,5],m2", "n3"), ("n[4]-ib,m", "n4-ib")],
)
def test_rank_0_of_a_slurm_job_is_on_its_first_node(nodes: str, first: str) -> None:
    assert slurm_address({"SLURM_NODELIST": nodes, "SLURM_JOB_ID": "1234567"}) == (first, "19567")
    with pytest.raises(ConfigError, match="do not say where rank 0 is; set MASTER_ADDR"):
        slurm_address({"SLURM_NODELIST": nodes})


# --- ranks that fail

RANKS = """
import os, signal, time

def task(mode, rank, progress):
    progress(0, 2, "meeting")
    if rank == 0 and mode == "killed":
        raise RuntimeError("Connection closed by peer")  # an effect that is reported before its cause
    if rank == 1:
        if mode == "killed":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if mode == "exits":
            os._exit(3)
        if mode == "raises":
            raise ValueError("boom\\nnative stack")
        time.sleep(60)
    progress(1, 2, "waiting for rank 1")
    time.sleep(60)
"""
PARENT = """
from functools import partial
from alone.failing import task
from alone.watched import run_watched
if __name__ == "__main__":
    told = lambda *step: print(step, flush=True)
    run_watched(partial(task, "hangs"), 2, name="test", timeout_s=60, progress=told)
"""
Run = Callable[..., object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run_watched` on a failing task; both by themselves, so that the processes start without importing torch."""
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "failing.py").write_text(RANKS)
    shutil.copy(watched_ranks.__file__, folder / "watched.py")
    monkeypatch.syspath_prepend(tmp_path)
    watched, failing = import_module("alone.watched"), import_module("alone.failing")
    yield lambda mode, ranks, **knobs: watched.run_watched(partial(failing.task, mode), ranks, name="test", **knobs)
    for name in ("alone.watched", "alone.failing", "alone"):
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_child_stays() -> Iterator[None]:
    """But those that were there before (other files' fixtures), and multiprocessing's own helper."""
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            is_helper = "resource_tracker" in " ".join(child.cmdline())
            if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE and not is_helper:
                left.append(child)
    assert left == []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("killed", r"rank 1 of 3 was killed by SIGKILL \(last step: meeting\)"),
        ("exits", r"rank 1 of 3 ended with exit code 3 and no result"),
        ("raises", r"rank 1 of 3 failed: ValueError: boom \(last step"),
        ("hangs", r"rank 1 of 3 has stood still for \d+ s \(alive; last step: meeting\)"),
        ("stopped", r"rank 1 of 3 has stood still for \d+ s \(stopped; last step: meeting\)"),
    ],
)
def test_a_rank_that_fails_is_named_and_none_is_left(mode: str, message: str, run: Run) -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=f"^test: {message}"):
        run(mode, 3, timeout_s=3.6 if mode == "stopped" else 1.0)
    assert time.monotonic() - start < 10


def test_an_interrupt_ends_all_ranks(run: Run) -> None:
    def interrupt(done: int, total: int, doing: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("hangs", 2, timeout_s=30, progress=interrupt)


def test_ranks_end_with_a_parent_that_is_killed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    mark = f"link-probe-{os.getpid()}-{os.urandom(4).hex()}"
    command, environment = [sys.executable, str(tmp_path / "parent.py")], {**os.environ, "PL_PIPE_TEST_MARK": mark}
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert "meeting" in parent.stdout.readline()
        ranks = [process for process in marked_processes(mark) if process.pid != parent.pid]
        assert len(ranks) >= 2
        parent.kill()
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
    finally:
        for process in marked_processes(mark):
            process.kill()
        parent.communicate()


# --- real probes


def die(rank: int, doing: str) -> None:
    """Kills rank 1 in the middle of a probe."""
    if rank == 1 and doing == "ranks 0 and 1":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [2, 3])
def test_local_ranks_are_probed(count: int) -> None:
    steps: list[tuple[int, int, str]] = []
    report = probe_local(count, sizes=SMALL, repeats=5, pair_budget_s=60.0, progress=lambda *step: steps.append(step))
    cluster = cluster_of(report)
    pairs = count * (count - 1) // 2
    assert [pair.ranks for pair in report.pairs] == pairs_to_measure("a" * count)
    assert all([timing.size_bytes for timing in pair.timings] == list(SMALL) for pair in report.pairs)
    assert [entry.ranks for entry in report.all_reduces] == [tuple(range(count))]
    assert (len(set(report.hosts)), report.backend, report.device, report.remark) == (1, "gloo", "cpu", "")
    (level,) = cluster.levels
    assert level.members == count
    assert 1e7 < level.bandwidth < 1e12
    assert 1e-6 < level.latency_s < 0.1
    assert [done for done, _, _ in steps] == list(range(pairs + 2))
    assert steps[-1] == (pairs + 1, pairs + 1, "done")


def test_a_rank_that_dies_while_it_probes_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"link probe: rank 1 of 2 was killed by SIGKILL"):
        probe_local(2, sizes=SMALL, repeats=5, on_step=die)
    assert time.monotonic() - start < 60  # most of it is starting


LAUNCHED = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from pl_pipe.cluster import Launch, detect_launch
from pl_pipe.profiling.link_report import cluster_of, write_cluster
from pl_pipe.profiling.probe_processes import probe_launched

hosts = int(os.environ.get("TEST_HOSTS", "0"))
launch = detect_launch(os.environ) if not hosts else Launch("torchrun", "job", int(os.environ["RANK"]), 2, hosts)
threads = torch.get_num_threads()
report = probe_launched(launch, sizes=[int(size) for size in sys.argv[2].split(",")], repeats=5, pair_budget_s=0.5)
assert (report is None) == (launch.rank > 0)
assert not dist.is_initialized() and torch.get_num_threads() == threads
if not hosts:  # the job goes on with a group of its own, through the same store
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
if report is not None:
    write_cluster(report, cluster_of(report), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_launched_job_is_probed(tmp_path: Path) -> None:
    script, path = tmp_path / "launched.py", tmp_path / "cluster.json"
    script.write_text(LAUNCHED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*torchrun, *meeting, str(script), str(path), "4096,1048576"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    (level,) = read_cluster(path).levels
    assert level.members == 2
    assert level.bandwidth > 1e7


@pytest.fixture
def two_hosts(network: None) -> Iterator[list[tuple[str, str]]]:
    """Namespace and interface of two rehearsed hosts, joined by a link of 200 Mbit/s."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("rehearsed hosts need root and iproute2")
    mark = f"{os.getpid() % 100000}{os.urandom(2).hex()}"
    hosts = [(f"plp{mark}a", f"v{mark}a"), (f"plp{mark}b", f"v{mark}b")]

    def ip(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)

    try:
        try:
            for space, _ in hosts:
                ip("ip", "netns", "add", space)
            ip("ip", "link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")
        for number, (space, card) in enumerate(hosts, start=1):
            ip("ip", "link", "set", card, "netns", space)
            ip("ip", "-n", space, "addr", "add", f"10.231.7.{number}/24", "dev", card)
            ip("ip", "-n", space, "link", "set", "lo", "up")
            ip("ip", "-n", space, "link", "set", card, "up")
            shape = ["root", "tbf", "rate", "200mbit", "burst", "32kb", "latency", "400ms"]
            ip("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", card, *shape)
        yield hosts
    finally:
        for space, _ in hosts:  # takes the interfaces with it
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=10)


def test_a_capped_link_between_two_hosts_is_measured(two_hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    """Two hosts of two ranks: the level inside is fast, the level between is as slow as its cap."""
    path = tmp_path / "cluster.json"
    for _ in range(4):  # on a busy machine, small messages wait for the processor, and the line becomes flatter
        _probe_between(two_hosts, tmp_path, path)
        inside, between = read_cluster(path).levels
        if between.bandwidth == pytest.approx(CAP, rel=0.2) and inside.bandwidth > 4 * CAP:
            break
    assert (inside.members, between.members) == (2, 2)
    assert between.bandwidth == pytest.approx(CAP, rel=0.2)
    assert inside.bandwidth > 4 * CAP
    assert 1 < between.all_reduce_factor < 5
    content = json.loads(path.read_text())
    assert len(set(content["hosts"])) == 2
    assert [entry["ranks"] for entry in content["all_reduce"]] == [[0, 1, 2, 3], [0, 1], [2, 3]]


def _probe_between(two_hosts: list[tuple[str, str]], folder: Path, path: Path) -> None:
    script = folder / "launched.py"
    script.write_text(LAUNCHED)
    sizes = ",".join(str(size) for size in SIZES[:-2])
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(4):
            space, card = two_hosts[rank // 2]
            meeting = {"MASTER_ADDR": "10.231.7.1", "MASTER_PORT": "29511", "RANK": str(rank), "TEST_HOSTS": "2"}
            command = ["ip", "netns", "exec", space, sys.executable, str(script), str(path), sizes]
            environment = {**os.environ, **meeting, "GLOO_SOCKET_IFNAME": card}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
