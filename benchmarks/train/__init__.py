"""Training as a whole: throughput, memory, loss curves, time to the first step."""
