"""How long planning takes: published profiles beside the original optimizer's recorded times, and graphs it cannot do.

    python benchmarks/planner/run.py --profiles FOLDER      # with PipeDream's profiles and reference_answers.json
    python benchmarks/planner/run.py                        # synthetic graphs only

Every time is the median of `--repeats` runs, each from a parsed graph with no cuts kept from the run before; the range
follows. The original's times were recorded by whoever made `reference_answers.json`, on a machine of their own.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerGraph, LayerNode, read_graph
from pl_pipe.partition import Plan, partition
from pl_pipe.partition.cuts import cuts_of
from pl_pipe.partition.optimizer import considered_cuts


def timed(make: Callable[[], Plan], repeats: int) -> tuple[Plan, float, str]:
    """The plan, the median time, and the range."""
    times = []
    for _ in range(repeats):
        cuts_of.cache_clear()
        began = time.perf_counter()
        plan = make()
        times.append(time.perf_counter() - began)
    return plan, statistics.median(times), f"{min(times):.3f}-{max(times):.3f}"


def node(name: str, random: np.random.Generator) -> LayerNode:
    forward, backward = random.uniform(1e-4, 1e-3), random.uniform(1e-4, 2e-3)
    outputs, parameters = int(random.integers(10_000, 1_000_000)), int(random.integers(0, 10_000_000))
    return LayerNode(name, "Layer()", forward, backward, (outputs,), parameters)


def chain(count: int) -> LayerGraph:
    random = np.random.default_rng(0)
    nodes = tuple(node(f"n{index}", random) for index in range(count))
    return LayerGraph(nodes, tuple((f"n{index}", f"n{index + 1}") for index in range(count - 1)))


def inception_like(blocks: int = 11, width: int = 4, depth: int = 7) -> LayerGraph:
    """Blocks of parallel branches between joins, as in Inception v3."""
    random = np.random.default_rng(0)
    nodes, edges, last = [node("stem", random)], [], "stem"
    for block in range(blocks):
        ends = []
        for branch in range(width):
            before = last
            for step in range(depth):
                name = f"b{block}_{branch}_{step}"
                nodes.append(node(name, random))
                edges.append((before, name))
                before = name
            ends.append(before)
        last = f"join{block}"
        nodes.append(node(last, random))
        edges += [(end, last) for end in ends]
    return LayerGraph(tuple(nodes), tuple(edges))


def nasnet_like(cells: int = 18, branches: int = 10, depth: int = 6) -> LayerGraph:
    """Cells that read the two cells before them, so that no layer but the ends is on every path; over 1,000 layers."""
    random = np.random.default_rng(0)
    nodes, edges = [node("in0", random), node("in1", random)], [("in0", "in1")]
    recent = ["in0", "in1"]
    for cell in range(cells):
        ends = []
        for branch in range(branches):
            before = recent[branch % 2]
            for step in range(depth):
                name = f"c{cell}_{branch}_{step}"
                nodes.append(node(name, random))
                edges.append((before, name))
                before = name
            ends.append(before)
        join = f"cell{cell}"
        nodes.append(node(join, random))
        edges += [(end, join) for end in ends]
        recent = [recent[1], join]
    return LayerGraph(tuple(nodes), tuple(edges))


def published(folder: Path, repeats: int) -> None:
    answers: list[dict[str, Any]] = json.loads((folder / "reference_answers.json").read_text())["results"]
    graphs = {name: read_graph(folder / f"{name}.graph.txt") for name in sorted({a["profile"] for a in answers})}
    print("published profiles, 16 workers, 1.25e9 bytes/s, activations counted")
    print(
        f"{'profile':<14}{'cuts':>6}{'original s':>12}{'ours s':>9}  {'range':<14}"
        f"{'original ms':>12}{'ours ms':>9}  plan"
    )
    ours_s = theirs_s = 0.0
    not_worse = better = 0
    for answer in answers:
        given = answer["args"]

        def make(given: dict[str, Any] = given, profile: str = answer["profile"]) -> Plan:
            return partition(
                graphs[profile],
                cluster=Cluster.of_levels(given["n"], given["b"]),
                cost_model="pipedream",
                activation_compression_ratio=given["acr"],
                straight=given["straight_pipeline"],
                memory_bytes=given["memory_constraint_bytes"],
                use_fewer=given["use_fewer_machines"],
            )

        plain = not (given["straight_pipeline"] or given["memory_constraint_bytes"] or given["use_fewer_machines"])
        shown = given["n"] == [16] and given["b"] == [1.25e9] and given["acr"] == 1 and plain
        plan, median_s, spread = timed(make, repeats if shown else 1)
        ours_s, theirs_s = ours_s + median_s, theirs_s + answer["optimizer_wall_s"]
        not_worse += plan.predicted_step_s <= answer["pipeline_time_s"] + 1e-9
        better += plan.predicted_step_s < answer["pipeline_time_s"] - 1e-9
        if shown:
            print(
                f"{answer['profile']:<14}{len(cuts_of(graphs[answer['profile']])) - 1:>6}"
                f"{answer['optimizer_wall_s']:>12.2f}{median_s:>9.3f}  {spread:<14}"
                f"{answer['pipeline_time_s'] * 1e3:>12.3f}{plan.predicted_step_s * 1e3:>9.3f}  {plan.shape}"
            )
    print(f"all {len(answers)} settings: original {theirs_s:.0f} s recorded, ours {ours_s:.1f} s; ", end="")
    print(f"never slower plans: {not_worse} of {len(answers)}, faster ones: {better}\n")


def synthetic(repeats: int) -> None:
    print(f"{'graph':<34}{'layers':>8}{'cuts':>7}{'workers':>9}  {'cost model':<11}{'s':>7}  range")
    two_levels = Cluster.of_levels([8, 16], [1.25e10, 1.25e9])
    for name, graph, cluster in (
        ("chain", chain(1000), Cluster.flat(1024, 1.25e9)),
        ("inception-like", inception_like(), Cluster.flat(16, 1.25e9)),
        ("NASNet-like", nasnet_like(), Cluster.flat(16, 1.25e9)),
        ("NASNet-like", nasnet_like(), Cluster.flat(1024, 1.25e9)),
        ("NASNet-like, 16 hosts of 8", nasnet_like(), two_levels),
        ("chain, 16 hosts of 8", chain(1000), two_levels),
    ):
        for cost_model in ("pipedream", "overlap"):
            plan, median_s, spread = timed(
                lambda graph=graph, cluster=cluster, cost_model=cost_model: partition(
                    graph, cluster=cluster, cost_model=cost_model, activation_compression_ratio=1.0
                ),
                repeats,
            )
            cuts = len(considered_cuts(graph, cluster)) - 1
            print(
                f"{name:<34}{len(graph.nodes):>8}{cuts:>7}{cluster.workers:>9}  {cost_model:<11}"
                f"{median_s:>7.2f}  {spread}  ({plan.single_device_step_s / plan.predicted_step_s:.1f}× one device)"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this process: {peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder with PipeDream's profiles and reference_answers.json")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.profiles is not None:
        published(arguments.profiles, arguments.repeats)
    synthetic(arguments.repeats)


if __name__ == "__main__":
    main()
