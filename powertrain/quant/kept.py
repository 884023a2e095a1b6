"""KeepsGates: gated MLPs that can save gate and up in FP8 for backward (ops/fp8/gated.py)."""

from torch import nn


class KeepsGates(nn.Module):
    """A module with linear layers `gate` and `up`; on request it computes by `fp8_gated_activation`."""

    keeps_fp8: bool = False  # `quantize_model(..., keep="fp8")` sets it
