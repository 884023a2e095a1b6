"""The gradient of sinks: one program per block of rows of a head, whose sums are added up by column_sums.

dsink_h = - sum over rows of exp(sink_h - lse_i) * delta_i        delta_i = o_i do_i - dlse_i
"""

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.layouts import to_lse_order
from powertrain.ops.attention.operands import BackwardCall
from powertrain.ops.attention.triton.tiles import LOG2E, to_int64
from powertrain.ops.column_sums import column_sums
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.dispatch import Op
from powertrain.runtime.launch import kernel


@kernel(unaligned=("sinks_ptr", "lse_ptr", "dlse_ptr"))
def _attention_sinks_bwd_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, sinks_ptr, sums_ptr, heads, queries, blocks,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """sums [b * blocks, heads]: each program's share."""
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, head = to_int64(index // heads), to_int64(index % heads)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (i < queries)[:, None] & (cols < D)
    rows = to_int64(i)[:, None]
    o = tl.load(o_ptr + b * stride_ob + head * stride_oh + rows * stride_os + cols, mask=mask, other=0.0)
    do = tl.load(do_ptr + b * stride_dob + head * stride_doh + rows * stride_dos + cols, mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    at = to_int64(index) * queries + i
    lse = tl.load(lse_ptr + at, mask=i < queries, other=float("-inf"))  # [BLOCK_M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=i < queries, other=0.0)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    # a row without an LSE has no sink to share with
    shares = tl.where(lse == float("-inf"), 0.0, tl.exp2((sink - lse) * LOG2E) * delta)
    tl.store(sums_ptr + (b * blocks + block) * heads + head, -tl.sum(shares, 0))


def sinks_grad(call: BackwardCall) -> Tensor:
    """[heads], of the sinks' dtype."""
    sinks, layout = call.args.sinks, call.args.layout
    assert sinks is not None
    # [b, h, s, e], [h, t, e] or [b, g, h, s, e]
    out, dout = (to_lse_order(x, layout) for x in (call.out, call.dout))
    if layout == "thd":
        out, dout = out[None], dout[None]
    out, dout = (x.flatten(1, -3) for x in (out, dout))
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    grad: Tensor = _sinks_bwd_op(dout, call.dlse, out, call.lse, sinks)
    return grad


def _sinks_bwd(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    batch, heads, queries, d = out.shape
    width = next_power_of_2(d)
    block = max(1, 8192 // width)
    blocks = cdiv(queries, block)
    sums = torch.empty((batch * blocks, heads), dtype=torch.float32, device=out.device)
    if sums.numel():
        _attention_sinks_bwd_kernel[(batch * heads * blocks,)](
            out, dout, lse, None if dlse is None else dlse.contiguous(), sinks, sums, heads, queries, blocks,
            *out.stride()[:3], *dout.stride()[:3], D=d, BLOCK_M=block, BLOCK_D=width, num_warps=4,
        )  # fmt: skip
    grad = torch.empty_like(sinks, memory_format=torch.contiguous_format)
    column_sums(sums, grad)
    return grad


_sinks_bwd_op = Op(
    "attention_sinks_bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor sinks) -> Tensor",
    _sinks_bwd,
    lambda dout, dlse, out, lse, sinks: torch.empty_like(sinks, memory_format=torch.contiguous_format),
)
