"""Runs a schedule on profiled costs and a cluster. partition, schedule -> *simulate* -> report."""
