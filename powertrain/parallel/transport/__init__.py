"""Transports of rows between ranks: NVLink's copy engines, NCCL, gloo, or threads in a simulation."""

import powertrain.runtime.compile.triton_compat  # noqa: F401  before triton: its interpreter is chosen on import
