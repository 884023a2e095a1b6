"""What a run prints, logs and reports."""
