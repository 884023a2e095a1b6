"""The attention kernels for sm_90, in Gluon (docs/hopper.md)."""
