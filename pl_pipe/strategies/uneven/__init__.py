"""Workers, or whole pipelines, that are not equally fast, under Lightning: one rule each, and `sdpipe`."""
