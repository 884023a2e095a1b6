"""Fused ops: pure functions on tensors, one file each."""

from powertrain.runtime.gc_disabled import gc_disabled

with gc_disabled():
    # before any op imports triton: under POWERTRAIN_INTERPRET=1 this switches Triton to its interpreter
    import powertrain.runtime.compile.triton_compat  # noqa: F401
