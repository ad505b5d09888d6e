"""Measures models and links. model -> *profiling* -> graph, cluster."""
