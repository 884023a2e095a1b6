"""Attention by other libraries' kernels and by plain PyTorch, and what each of them requires."""
