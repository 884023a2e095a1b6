"""Training: configuration, data, the loop, checkpoints, reports."""
