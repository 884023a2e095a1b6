"""Checkpoints on disk, and other formats read and written."""
