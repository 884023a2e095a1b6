"""Layers whose weights are sharded over ranks."""
