"""For tests and benchmarks: error against float64, timing. Imports the runtime only."""
