"""Benchmarks beside the best alternative a user would really use; results in benchmarks/results/."""
