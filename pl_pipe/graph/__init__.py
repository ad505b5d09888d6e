"""The layer graph: what a model costs, layer by layer, and in which order its layers depend on each other."""

from pl_pipe.graph.layer_graph import LayerGraph, LayerNode, ValueRead
from pl_pipe.graph.pipedream_text import TextStyle, format_graph, parse_graph
from pl_pipe.graph.profile import Profile, Spread, read_graph, read_profile, write_profile

__all__ = [
    "LayerGraph",
    "LayerNode",
    "Profile",
    "Spread",
    "TextStyle",
    "ValueRead",
    "format_graph",
    "parse_graph",
    "read_graph",
    "read_profile",
    "write_profile",
]
