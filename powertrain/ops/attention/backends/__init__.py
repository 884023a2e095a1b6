"""Attention backends: kernels of other libraries, plain PyTorch, and the requirements of each."""
