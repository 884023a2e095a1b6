"""The compile service: worker processes, the store of compiled kernels, and what differs between Triton versions."""
