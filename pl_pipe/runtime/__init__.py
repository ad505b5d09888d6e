"""What runs: checkpoints now, the pipeline's executor and weight versions on top of them."""
