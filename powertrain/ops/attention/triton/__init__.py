"""The universal attention kernels, in Triton."""
