"""The compile service: worker processes, the store of compiled kernels, and the differences between Triton versions."""
