"""Output of a run: screen, logs, report."""
