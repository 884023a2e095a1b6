"""What tests and benchmarks share: error against float64, timing. Imports the runtime only."""
