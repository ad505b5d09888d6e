"""A run's `cluster` group says what its plan counts on. configuration -> *described links* -> pipeline plan."""

from dataclasses import replace

from pl_pipe.cluster import ClusterConfig, is_described, planned_cluster
from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy
from pl_pipe.strategies.pipeline.plan_options import MADE
from pl_pipe.strategies.pipeline.run_cluster import LOCAL
from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy


def plan_for(strategy: object, cluster: ClusterConfig) -> None:
    """Lets a strategy that plans know of links that the settings describe; one that was told by itself stays so."""
    if not isinstance(strategy, PipeDreamStrategy) or not is_described(cluster):
        return
    if isinstance(strategy, SDPipeStrategy):
        return  # the links of all its pipelines are not those of one
    if strategy.settings.cluster == LOCAL and strategy.settings.plan in MADE:
        strategy.settings = replace(strategy.settings, cluster=planned_cluster(cluster))
