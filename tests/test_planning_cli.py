"""The commands that decide and predict, from their settings to their files."""

import csv
import json
from pathlib import Path

import pytest

from pl_pipe.cluster import Cluster, Level
from pl_pipe.errors import ConfigError
from pl_pipe.graph import LayerGraph, LayerNode, ValueRead, format_graph, parse_graph
from pl_pipe.graph.profile import Profile, Spread, write_profile
from pl_pipe.partition import read_plan
from tests.conftest import TIMEOUT_S, Inside, run_cli

PNG = b"\x89PNG\r\n"


def small_graph(layers: int = 6) -> LayerGraph:
    nodes = [LayerNode("node0", "Input", 0.0, 0.0, (1000,), 0)]
    nodes += [
        LayerNode(f"node{i}", f"Linear({i})", 1e-3 * i, 2e-3 * i, (1000 * i,), 5000 * i, None, f"net.{i}", 3000 * i)
        for i in range(1, layers + 1)
    ]
    return LayerGraph(tuple(nodes), tuple((f"node{i}", f"node{i + 1}") for i in range(layers)))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    graph = small_graph()
    spread = {node.name: Spread((0.0, 1e-3), (0.0, 1e-3)) for node in graph.nodes}
    facts = Profile(graph, "Net", "cpu", "float32", ("float32[8, 4]",), "2.10", 5, graph.compute_s, None, spread)
    write_profile(facts, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_plan_then_simulate(inside: Inside, profile: Path, tmp_path: Path) -> None:
    code, out, err = inside("plan", f"profile={profile}", "cluster.devices=4", "plan.out=made/plan.json")
    assert (code, err) == (0, "")
    assert "4 of 4 workers, overlap cost model" in out
    assert "assumed cluster.bandwidth=1.25e+09" in out
    plan = read_plan(tmp_path / "made" / "plan.json")
    assert plan.ranks == 4
    marked, _ = parse_graph((tmp_path / "made" / "plan.graph.txt").read_text())
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    assert {node.name: node.stage for node in marked.nodes} == stage_of
    assert (tmp_path / "made" / "plan.png").read_bytes().startswith(PNG)

    code, out, err = inside("simulate", "plan.path=made/plan.json", "schedule=1f1b", "batches=16", "accumulate=8")
    assert (code, err) == (0, "")
    made = tmp_path / "made" / "plan_1f1b"
    numbers = json.loads((made / "simulation.json").read_text())
    assert (numbers["schedule"], numbers["batches"], numbers["plan"]) == ("1f1b", 16, plan.shape)
    assert set(numbers["utilisation"]) == {"0", "1", "2", "3"}
    assert (made / "timeline.png").read_bytes().startswith(PNG)
    events = json.loads((made / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("F") for event in events if event["ph"] == "X") == 16 * len(plan.stages)
    assert len((made / "schedule.txt").read_text().splitlines()) == 4
    assert not (tmp_path / "outputs").exists(), "no run directory"


def test_the_plan_file_holds_what_is_promised(inside: Inside, profile: Path, tmp_path: Path) -> None:
    assert inside("plan", f"profile={profile}", "cluster.devices=2", "plan.straight=true")[0] == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    promised = (
        "schema cost_model stages predicted_step_s data_parallel_step_s single_device_step_s speedup_over_data_parallel"
    )
    assert set(promised.split()) <= set(content)
    assert {"nodes", "modules", "replicas", "ranks", "compute_s", "parameter_bytes"} <= set(content["stages"][0])
    assert content["stages"][0]["modules"][0] == "net.1"


def test_levels_and_costs_reach_the_optimizer(inside: Inside, profile: Path, tmp_path: Path) -> None:
    code, _, err = inside(
        "plan", f"profile={profile}", "cluster.levels=[[2,1e10],[2,1e9]]", "plan.cost_model=pipedream",
        "plan.activation_compression_ratio=1.0", "plan.memory_bytes=16e9", "plan.use_fewer=true",
    )  # fmt: skip
    assert (code, err) == (0, "")
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.cost_model, plan.cluster) == ("pipedream", Cluster.of_levels([2, 2], [1e10, 1e9]))


def test_a_measured_cluster_is_read(inside: Inside, profile: Path, tmp_path: Path) -> None:
    cluster = Cluster((Level(3, 2e9, 1e-4, 2.5),))
    (tmp_path / "cluster.json").write_text(json.dumps({**cluster.as_json(), "pairs": []}))
    assert inside("plan", f"profile={profile}", "cluster=file")[0] == 0
    assert read_plan(tmp_path / "plan.json").cluster == cluster


def test_a_split_by_hand(inside: Inside, profile: Path, tmp_path: Path) -> None:
    code, _, err = inside(
        "plan", f"profile={profile}", "cluster.devices=4", "plan.split_after=[net.3]", "plan.replicas=[3,1]"
    )
    assert (code, err) == (0, "")
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.shape, plan.stages[1].nodes) == ("3-1", ("node4", "node5", "node6"))


def test_a_graph_of_pipedreams_is_read(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(format_graph(small_graph()))
    assert inside("plan", "profile=graph.txt", "cluster.devices=2")[0] == 0


def test_value_reads_are_told(inside: Inside, profile: Path, tmp_path: Path) -> None:
    content = json.loads(profile.read_text())
    content["reads"] = [vars(ValueRead("node2", "node3", "model.py:17"))]
    profile.write_text(json.dumps(content))
    _, out, _ = inside("plan", f"profile={profile}", "cluster.devices=2")
    assert "model.py:17 reads a value of node2" in out


def test_sweep(inside: Inside, profile: Path, tmp_path: Path) -> None:
    code, _, err = inside("sweep", f"profile={profile}", "sweep.workers=[2,4]", "sweep.bandwidths=[1e7,1e9]")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [(row["workers"], row["bandwidth"]) for row in rows] == [
        ("2", "10000000.0"), ("4", "10000000.0"), ("2", "1000000000.0"), ("4", "1000000000.0"),
    ]  # fmt: skip
    assert float(rows[0]["predicted_speedup"]) >= 1.0
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "profile is not set"),
        (("plan", "profile=absent.json", "cluster.devices=2"), "profile=absent.json cannot be read"),
        (("plan", "profile=absent.txt", "cluster.devices=2"), "profile=absent.txt cannot be read"),
        (("plan", "profile=PROFILE"), "one description of the cluster, got none"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "cluster.levels=[[2,1e9]]"), "got cluster.devices and"),
        (("plan", "profile=PROFILE", "cluster.levels=[[2,1e9],[2]]"), "not a list of [workers, bytes per second]"),
        (("plan", "profile=PROFILE", "cluster.levels=[[2,fast]]"), "not a list of [workers, bytes per second]"),
        (("plan", "profile=PROFILE", "cluster.levels=[[2,1e9]]", "cluster.bandwidth=1e9"), "go with cluster.devices"),
        (("plan", "profile=PROFILE", "cluster=file"), "cluster.path=cluster.json cannot be read"),
        (("plan", "profile=PROFILE", "cluster.devices=0"), "joins 0 members"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "cluster.bandwidth=0"), "bandwidth 0"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "plan.cost_model=magic"), "plan.cost_model=magic is unknown"),
        (("plan", "profile=PROFILE", "cluster.devices=9", "plan.straight=true"), "9 workers and 6 layers"),
        (
            ("plan", "profile=PROFILE", "cluster.devices=2", "plan.memory_bytes=1e3"),
            "no plan for 2 workers was found",
        ),
        (("plan", "profile=PROFILE", "cluster.devices=2", "plan.out=plan.txt"), "must end in .json"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "plan.outt=x"), "outt"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "plan.out=PROFILE"), "and not be the profile"),
        (("plan", "profile=PROFILE", "cluster.devices=100000000"), "more than the 16384 that can be planned for"),
        (("plan", "profile=PROFILE", "cluster.levels=[[nan,1e9]]"), "not a list of [workers, bytes per second]"),
        (("plan", "profile=PROFILE", "cluster.bandwidth=1e9"), "cluster.bandwidth without cluster.devices"),
        (("plan", "profile=PROFILE", "cluster.devices=2", "plan.optimizer_state_factor=-1"), "is not 0 or more"),
        (
            ("plan", "profile=PROFILE", "cluster.devices=2", "plan.split_after=[net.1]", "plan.straight=true"),
            "choices of the optimizer",
        ),
        (("simulate",), "plan.path is not set"),
        (("simulate", "plan.path=absent.json"), "absent.json cannot be read"),
        (("sweep",), "profile is not set"),
        (("sweep", "profile=PROFILE", "sweep.workers=[]"), "at least one number"),
    ],
)
def test_bad_input_is_one_message(
    inside: Inside, profile: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    code, out, err = inside(*(argument.replace("PROFILE", str(profile)) for argument in arguments))
    assert code == 1
    assert message in err
    assert "Error executing job" not in out + err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("schedule=magic",), "schedule=magic is unknown; choose one of pipedream"),
        (("batches=0",), "batches=0"),
        (("update=never",), "update=never is unknown"),
        (("schedule=pipedream_2bw", "accumulate=1"), "accumulate=1"),
        (("simulate.slowdown={9:2.0}",), "rank 9"),
        (("simulate.contention={0:1.5}",), "contention of level 0"),
        (("simulate.contention={0:1e-320}",), "contention of level 0"),
        (("simulate.slowdown={0.5:2}",), "simulate.slowdown={0.5: 2} is not a map of numbers"),
        (("simulate.slowdown=[[0,2]]",), "is not a map of numbers"),
        (("simulate.jitter=1e200",), "jitter=1e+200; give 0 to 10"),
        (("simulate.jitter=0.1", "simulate.seed=-1"), "seed=-1"),
        (("deeper=-1",), "deeper=-1"),
        (("cluster.devices=1",), "the plan uses 3 workers, the cluster given has 1"),
    ],
)
def test_bad_simulations(inside: Inside, profile: Path, settings: tuple[str, ...], message: str) -> None:
    assert inside("plan", f"profile={profile}", "cluster.devices=3", "plan.straight=true")[0] == 0
    code, out, err = inside("simulate", "plan.path=plan.json", *settings)
    assert code == 1
    assert message in err
    assert "Error executing job" not in out + err
    assert not (profile.parent / "plan_pipedream").exists()


def test_a_plan_for_another_model(inside: Inside, profile: Path, tmp_path: Path) -> None:
    assert inside("plan", f"profile={profile}", "cluster.devices=2")[0] == 0
    (tmp_path / "other.txt").write_text(format_graph(small_graph(layers=9)))
    code, _, err = inside("simulate", "plan.path=plan.json", "profile=other.txt")
    assert code == 1
    assert "the model has layers that plan.json does not name: node7, node8, node9 (3 in all)" in err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("forward_s", float("nan"), "forward_s=nan"),
        ("forward_s", float("inf"), "forward_s=inf"),
        ("parameter_bytes", -1, "parameter_bytes=-1"),
        ("parameter_bytes", float("inf"), "cannot be read as a plan"),
        ("nodes", "abc", "'abc' is not a list of names"),
        ("ranks", [0, 99], "rank 99, but the cluster has 2 workers"),
    ],
)
def test_impossible_plans_are_refused(inside: Inside, profile: Path, tmp_path: Path, key, value, message: str) -> None:
    assert inside("plan", f"profile={profile}", "cluster.devices=2", "plan.straight=true")[0] == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    content["stages"][0][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(content))
    code, _, err = inside("simulate", "plan.path=plan.json")
    assert code == 1
    assert message in err


def test_another_cluster_has_another_price(inside: Inside, profile: Path, tmp_path: Path) -> None:
    assert inside("plan", f"profile={profile}", "cluster.devices=2", "plan.straight=true")[0] == 0
    for name, bandwidth in (("fast", "1e9"), ("slow", "1e5")):
        command = ("simulate", "plan.path=plan.json", "cluster.devices=2", f"cluster.bandwidth={bandwidth}")
        assert inside(*command, f"simulate.out={name}")[0] == 0
    fast, slow = (json.loads((tmp_path / name / "simulation.json").read_text()) for name in ("fast", "slow"))
    assert slow["predicted_step_s"] > fast["predicted_step_s"]


def test_a_sweep_leaves_out_what_cannot_be_planned(inside: Inside, profile: Path, tmp_path: Path) -> None:
    settings = ("sweep.workers=[2,8]", "sweep.bandwidths=[1e9]", "plan.straight=true")
    code, out, err = inside("sweep", f"profile={profile}", *settings)
    assert (code, err) == (0, "")
    assert "left out: 8 workers at 1e+09 bytes/s: plan.straight=true puts one worker on each stage" in out
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == 1
    code, _, err = inside("sweep", f"profile={profile}", "sweep.workers=[8]", "plan.straight=true")
    assert (code, "no plan could be made for any cluster" in err) == (1, True)


def test_a_folder_in_the_way_leaves_nothing(inside: Inside, profile: Path, tmp_path: Path) -> None:
    (tmp_path / "dir.json").mkdir()
    before = sorted(tmp_path.iterdir())
    code, _, err = inside("plan", f"profile={profile}", "cluster.devices=2", "plan.out=dir.json")
    assert (code, "dir.json is a folder" in err) == (1, True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_profile(inside: Inside, profile: Path, tmp_path: Path) -> None:
    profile.write_text(profile.read_text()[:200])
    code, _, err = inside("plan", f"profile={profile}", "cluster.devices=2")
    assert (code, "cannot be read" in err) == (1, True)
    (tmp_path / "graph.txt").write_text("node1 -- Linear -- forward_compute_time=x")
    code, _, err = inside("plan", "profile=graph.txt", "cluster.devices=2")
    assert (code, "graph.txt line 1 cannot be read" in err) == (1, True)


def test_no_torch_is_needed_to_plan(profile: Path, tmp_path: Path) -> None:
    """Planning starts at once because it does not wait for torch."""
    import subprocess
    import sys

    program = (
        "import sys; from pl_pipe.cli import main; sys.argv = ['pl-pipe', 'plan', 'profile=profile.json', "
        "'cluster.devices=2']; main(); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


def test_help_shows_the_settings(tmp_path: Path) -> None:
    done = run_cli("plan", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cost_model: overlap" in done.stdout


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(ConfigError, match=r"1 levels of workers .* 2 bandwidths"):
        Cluster.of_levels([4], [1e9, 1e8])
