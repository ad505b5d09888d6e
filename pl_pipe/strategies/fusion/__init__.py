"""Variants of one model trained as one, under Lightning: `fusion`."""
