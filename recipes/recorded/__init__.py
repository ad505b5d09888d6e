"""Recorded compute: a model whose layers sleep for the times of a profile, and really send its bytes."""
