"""A model divided over ranks, under Lightning: `pipedream`, and what `auto` plans with."""
