"""Strategies: thin adapters between Lightning's hooks and the runtime, one file each."""
