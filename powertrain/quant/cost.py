"""Expected times and memory of a linear layer in FP8 and in bf16, from measured rates; needs no GPU.

product    2 M N K operations at the rate of its form, plus a fixed time
quantize   bytes of x [M, K], dy [M, N] and W [N, K], read and written, at a share of the memory's bandwidth, plus a
           fixed time
"""

from dataclasses import dataclass

from powertrain.quant.recipe import Recipe
from powertrain.runtime.target import Target

# TFLOP/s at M16384 N14336 K4096 on one H200, of cuBLAS and CUTLASS as torch 2.11 calls them (torch._scaled_mm):
# bf16; by recipe those of y, dx and dW. docs/log/fp8.md. dx by row and y and dx by block are our kernel's: torch's
# rates, 1381 and 1311, times the gain of ours in a run of both (benchmarks/results/2026-11-23_h200_fp8_gemm.md)
_SMS = 132
_BF16 = 804.0
_RATES = {
    "tensor": (1492.0, 1441.0, 1441.0),
    "row": (1540.0, 1422.0, 1060.0),
    "block": (1390.0, 1390.0, 1060.0),
}
# of grouped products at T32768 E32 N4096 K7168 on one H200, of y, dx and dW: bf16 by ops/grouped_gemm.py, FP8 by
# ops/fp8/grouped.py. dW, whose sums are promoted by groups of rows, is slower than bf16 at every size
_BF16_GROUPED = (752.0, 732.0, 696.0)
_GROUPED_RATES = {"row": (925.0, 943.0, 225.0), "block": (534.0, 517.0, 225.0)}
# fixed times in ms, of a layer's quantizations and of each of its three products, whatever their sizes: fitted to 12
# random layers on one H200 (benchmarks/results/2026-12-01_h200_fp8_sizes.md)
_QUANTIZE_LEAST, _PRODUCT_LEAST = 0.035, 0.007
_SHARE = 0.7  # of the datasheet's bandwidth that quantizing reaches, by docs/log/fp8.md


@dataclass(frozen=True)
class Expected:
    """Expected milliseconds and bytes saved for backward of one layer, forward and backward, in FP8 and bfloat16."""

    fprop: float
    dgrad: float
    wgrad: float
    quantize: float
    bf16: float
    saved: int
    saved_bf16: int

    @property
    def total(self) -> float:
        return self.fprop + self.dgrad + self.wgrad + self.quantize

    @property
    def wins(self) -> bool:
        return self.total < self.bf16


def _bytes(recipe: Recipe) -> tuple[int, int]:
    """Bytes moved per bfloat16 element to quantize x or dy (both copies), and W (forward and backward together)."""
    if recipe.by != "tensor":
        return 6, 6
    # by the last call's scale a tensor whose exponent has changed takes 4 more; that is not foreseen
    return (4, 6) if recipe.is_delayed or recipe.keeps_last else (6, 8)


def expected(M: int, N: int, K: int, recipe: Recipe, target: Target) -> Expected | None:
    """The costs of M tokens times a weight [N, K]; None without measured rates (other archs than sm_90)."""
    if target.arch != 90:
        return None
    operations = 2e-9 * M * N * K * _SMS / target.num_sms
    rates = _RATES[recipe.by]
    per_x, per_w = _bytes(recipe)
    moved = per_x * M * (N + K) + per_w * N * K
    groups = 4 * M * K // 128 if recipe.by != "tensor" else 4
    fprop, dgrad, wgrad = (operations / rate + _PRODUCT_LEAST for rate in rates)
    return Expected(
        fprop,
        dgrad,
        wgrad,
        moved / (_SHARE * target.bandwidth) * 1e3 + _QUANTIZE_LEAST,
        3 * (operations / _BF16 + _PRODUCT_LEAST),
        M * K + groups,
        2 * M * K,
    )


def expected_grouped(T: int, E: int, N: int, K: int, recipe: Recipe, target: Target) -> Expected | None:
    """T rows in groups, each times one of the E weights [N, K]; None where no rate is known: off sm_90, by tensor."""
    rates = _GROUPED_RATES.get(recipe.by)
    if target.arch != 90 or rates is None:
        return None
    operations = 2e-9 * T * N * K * _SMS / target.num_sms
    # both copies of x and dy, one for forward and one for backward of the weights; each reads 2 bytes and writes 1
    moved = 6 * T * (N + K) + 6 * E * N * K
    fprop, dgrad, wgrad = (operations / rate for rate in rates)
    return Expected(
        fprop,
        dgrad,
        wgrad,
        moved / (_SHARE * target.bandwidth) * 1e3,
        sum(operations / rate for rate in _BF16_GROUPED),
        T * K + 4 * T * K // 128,
        2 * T * K,
    )
