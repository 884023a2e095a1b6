"""Layers with parameters, on ops."""
