"""What runs a pipeline on one rank: the executor with its weight versions, and batches that are alike on all ranks."""
