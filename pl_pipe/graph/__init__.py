"""The layer graph: what a model costs, layer by layer, and in which order its layers depend on each other."""

from pl_pipe.graph.layer_graph import LayerGraph, LayerNode
from pl_pipe.graph.pipedream_text import TextStyle, format_graph, parse_graph

__all__ = ["LayerGraph", "LayerNode", "TextStyle", "format_graph", "parse_graph"]
