"""PyTorch's own attention kernels as backends: cuDNN, flash-2, efficient, and the CPU's flash attention.

Called as aten ops, so that no global switch or order of PyTorch's takes part; autograd's formulas are PyTorch's.
Tensors are handed over as strided views and nothing is copied. Their dropout draws from PyTorch's generator.

Limits: PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (checks before dispatch), and beyond them the
behaviour of torch 2.11 on an H200.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from powertrain.ops.attention.backends.requirements import KnownBad, Limits, known_bad
from powertrain.ops.attention.backends.versions import Installed, cudnn_name, installed
from powertrain.ops.attention.layouts import from_bhsd, to_bhsd
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, use
from powertrain.runtime.dispatch import wants_grad


def _needs_grad(*tensors: Tensor) -> bool:
    return wants_grad(*tensors)


def _added(call: AttentionCall, query: Tensor) -> Tensor | None:
    """The call's dense mask as a term added to the scores, in the query's dtype."""
    bias = call.tensors.bias
    if bias is None:
        return None
    if bias.dtype is torch.bool:
        return torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
    return bias.to(query.dtype)


def _no_cuda(problem: AttentionProblem) -> Iterator[Reason]:
    if problem.target is not None and not installed().cuda:
        yield Reason("this PyTorch is built without CUDA", "install a CUDA build of PyTorch")


_PYTORCH = "https://github.com/pytorch/pytorch/issues/"
_SDP_UTILS = "PyTorch's sdp_utils.cpp"
_TE_RULES = "TransformerEngine's get_attention_backend"


def _cudnn_heads_wide(p: AttentionProblem, here: Installed) -> bool:
    return max(p.head_dim_qk, p.head_dim_v) > 128


CUDNN_BAD = (
    KnownBad(
        "cuDNN gives NaN for the query's gradient where queries % 128 is 64 and there is a dense mask, on sm_90",
        (use("triton"), "pad the queries to a multiple of 128"),
        _PYTORCH + "196678",
        lambda p, here: p.lengths.queries_mod_128_is_64 and p.mask.bias != "none" and p.arch == 90,
    ),
    KnownBad(
        "cuDNN corrupts results with fewer than 8 key heads on sm_100",
        (use("triton", "flash"), "8 key heads"),
        _PYTORCH + "193893",
        lambda p, here: p.arch in (100, 103) and p.is_grouped and p.num_kv_heads < 8,
    ),
    KnownBad(
        "cuDNN gives NaN for the gradients of key and value with a single query",
        (use("triton", "flash"), "torch.no_grad()"),
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
        lambda p, here: p.needs_grad and p.lengths.size == "decode",
    ),
    KnownBad(
        "cuDNN before 9.15.1 reads beyond sequences whose length is no multiple of 128",
        (use("triton", "flash"), "a newer cuDNN"),
        _PYTORCH + "169849",
        lambda p, here: 0 < here.cudnn <= 91500,
    ),
    KnownBad(
        "cuDNN takes no single key",
        (use("triton", "flash"),),
        _SDP_UTILS,
        lambda p, here: p.lengths.single_key,
    ),
    # 9.19 dropped the shares asked for, of 1.7e7 weights, within 1.4e-4: 0.01, 0.05, 0.0625, 0.1, 0.125, 0.2, 0.3
    KnownBad(
        "cuDNN before 9.19 is said to have dropout_p in steps of 1/16",
        (use("triton", "flash"), "a newer cuDNN"),
        _SDP_UTILS,
        lambda p, here: p.dropout and 0 < here.cudnn < 91900,
    ),
    KnownBad(
        "cuDNN takes head dims above 128 on sm_90 and sm_10x only",
        (use("triton"), "head dims up to 128", "sm_90"),
        _SDP_UTILS,
        lambda p, here: _cudnn_heads_wide(p, here) and p.arch not in (90, 100, 103),
    ),
    KnownBad(
        "cuDNN from 9.11 gives wrong gradients on sm_90 for unequal head dims from 128 on, but for 192/128",
        (use("triton"), "192/128", "one head dim"),
        _TE_RULES,
        lambda p, here: (
            p.needs_grad
            and p.arch == 90
            and here.cudnn >= 91100
            and min(p.head_dim_qk, p.head_dim_v) >= 128
            and p.head_dim_qk != p.head_dim_v
            and (p.head_dim_qk, p.head_dim_v) != (192, 128)
        ),
    ),
    # up to 9.19 on sm_90, gradients for 160, 192, 224 and 256 were right (H200, torch 2.11)
    KnownBad(
        "cuDNN has a backward for head dims up to 128, 192/128 and 256/256 only, on sm_10x and from 9.22.1 on",
        (use("triton", "flash"), "one of those head dims"),
        _SDP_UTILS,
        lambda p, here: (
            p.needs_grad
            and _cudnn_heads_wide(p, here)
            and (p.arch != 90 or here.cudnn > 92200)
            and (p.head_dim_qk, p.head_dim_v) not in ((192, 128), (256, 256))
        ),
    ),
    KnownBad(
        "cuDNN takes dense masks over a multiple of 8 keys",
        (use("triton"), "pad keys and mask"),
        "not tried",
        lambda p, here: p.mask.bias != "none" and not p.lengths.keys_multiple_of_8,
    ),
)


class Cudnn:
    name = "cudnn"
    uses_philox_seed = False
    limits = Limits("cuDNN", head_dims_differ=True, bottom_right=False, top_left=True, bias=True, dropout=True)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _no_cuda(problem)
        yield from self.limits.why_not(problem)
        yield from known_bad(CUDNN_BAD, problem)
        version = installed().cudnn
        if problem.target is not None and installed().cuda and version < 90100:
            text = f"cuDNN 9.1 is the oldest that is used, got {cudnn_name(version) if version else 'none'}"
            yield Reason(text, "install a newer cuDNN")

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        q, k, v = (to_bhsd(x, call.layout) for x in (call.query, call.key, call.value))
        # the operator itself: scaled_dot_product_attention returns no LSE, and may take another backend
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, _added(call, q), call.return_lse or _needs_grad(q, k, v), call.dropout_p, call.mask.is_causal,
            False, scale=call.scale,
        )  # fmt: skip
        return from_bhsd(out, call.layout), lse.reshape(q.shape[:3]) if call.return_lse else None


FLASH_BAD = (
    KnownBad(
        "flash-2 has no backward for head dims 193 to 224, nor up to 256 with dropout, on sm_86, sm_89 and sm_12x",
        (use("triton"), "a head dim up to 192"),
        _PYTORCH + "100326",
        lambda p, here: (
            p.needs_grad
            and p.arch in (86, 87, 89, 120, 121)
            and (192 < p.head_dim_qk <= 224 or (p.head_dim_qk > 224 and p.dropout))
        ),
    ),
    KnownBad(
        "flash-2's backward leaves its memory where sequences padded to 128 queries, times heads times head dim, are "
        "2^31 elements",
        (use("triton", "hopper"), "fewer sequences at a time"),
        # 30300 x 1 queries, H12 D160; 2^31 by the int32 of its sums' addresses, 0.7 of it was right
        "benchmarks/results/2026-11-24_h200_attention_choice.md",
        lambda p, here: (
            p.needs_grad
            and p.lengths.queries < 128
            and 128 * p.lengths.sequences * p.num_heads * max(p.head_dim_qk, p.head_dim_v) >= 2**31
        ),
    ),
)


def packed_why_not(name: str, problem: AttentionProblem) -> Iterator[Reason]:
    """Packed sequences as other libraries' kernels take them; backends/zero_padding.py has zeroed their padding."""
    if problem.layout == "thd":
        if not problem.lengths.equal:
            text = f"{name} takes packed sequences with as many queries as keys only"
            yield Reason(text, use("triton"), "one cu_seqlens for both")
        if problem.compiling:
            yield Reason(f"{name} is not traced by torch.compile for thd", use("triton"), "call it outside")


class Flash:
    """Flash-2 as PyTorch brings it."""

    name = "flash"
    uses_philox_seed = False
    limits = Limits("flash-2", layouts=("bshd", "bhsd", "sbhd", "thd"), window=True, dropout=True)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _no_cuda(problem)
        yield from self.limits.why_not(problem)
        yield from packed_why_not("flash-2", problem)
        yield from known_bad(FLASH_BAD, problem)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        mask = call.mask
        causal = mask.is_causal and mask.left < 0
        if call.layout == "thd":
            from powertrain.ops.attention.backends import packed_flash  # imports Triton

            window = [mask.left, mask.right] if mask.has_window else []
            return packed_flash.attend(call, causal, window)
        window_sizes = {} if not mask.has_window else {"window_size_left": mask.left, "window_size_right": mask.right}
        q, k, v = (to_bhsd(x, call.layout).transpose(1, 2) for x in (call.query, call.key, call.value))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], call.dropout_p, causal, False, scale=call.scale, **window_sizes
        )
        out = from_bhsd(out.transpose(1, 2), call.layout)
        # flash-2 writes +inf where a row sees nothing
        return out, lse.masked_fill(lse == torch.inf, -torch.inf) if call.return_lse else None


class Efficient:
    """The CUTLASS kernels that came from xFormers: every arch, head dim and float32, and seldom the fastest."""

    name = "efficient"
    uses_philox_seed = False
    limits = Limits(
        "efficient attention", (torch.float16, torch.bfloat16, torch.float32), archs=(75, 121), head_dim=512,
        head_dims_differ=True, bottom_right=False, top_left=True, dropout=True,
    )  # fmt: skip

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _no_cuda(problem)
        yield from self.limits.why_not(problem)
        if problem.dtype is torch.bfloat16 and 0 < problem.arch < 80:
            text = f"efficient attention takes bfloat16 from sm_80 on, got {problem.where}"
            yield Reason(text, use("triton"), "float16")

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        q, k, v = (to_bhsd(x, call.layout).transpose(1, 2) for x in (call.query, call.key, call.value))
        groups = q.shape[2] // k.shape[2]
        if groups == 1:
            out, lse = self._one(call, q, k, v)
        else:  # key heads are shared by as many launches, never repeated in memory
            parts = [self._one(call, q[:, :, n::groups], k, v) for n in range(groups)]
            out = torch.stack([o for o, _ in parts], 3).flatten(2, 3)
            lse = torch.stack([x for _, x in parts], 2).flatten(1, 2)
        return from_bhsd(out.transpose(1, 2), call.layout), lse

    @staticmethod
    def _one(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [b, s, h, d], lse [b, h, s]) with as many key heads as query heads."""
        # 1: top left; bottom right is garbage with more queries than keys
        causal = int(call.mask.is_causal)
        wants_lse = call.return_lse or _needs_grad(q, k, v)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, call.dropout_p, causal, wants_lse, scale=call.scale
        )
        # the kernel pads it to a multiple of 32 queries
        return out, lse[:, :, : q.shape[1]]


CPU_BAD = (
    KnownBad(
        "PyTorch's CPU flash attention gives an LSE of 0 for a row that sees nothing",
        (use("chunked"), "no return_lse"),
        "seen with torch 2.13",
        lambda p, here: p.needs_lse and p.mask.bias != "none",
    ),
    KnownBad(
        "PyTorch's CPU flash attention gives a float64 LSE for float64 tensors and float32 for the others",
        (use("chunked"), "no return_lse"),
        "seen with torch 2.13",
        lambda p, here: p.needs_lse and p.dtype is torch.float64,
    ),
)


class Cpu:
    """PyTorch's flash attention for the CPU."""

    name = "cpu"
    uses_philox_seed = False
    limits = Limits(
        "PyTorch's CPU flash attention", (torch.float16, torch.bfloat16, torch.float32, torch.float64), archs=(0, 0),
        head_dim=512, head_dim_multiple=1, bottom_right=False, top_left=True, bias=True, deterministic=True,
        aligned=False,
    )  # fmt: skip

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from self.limits.why_not(problem)
        yield from known_bad(CPU_BAD, problem)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        q, k, v = (to_bhsd(x, call.layout) for x in (call.query, call.key, call.value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.mask.is_causal, attn_mask=_added(call, q), scale=call.scale
        )
        return from_bhsd(out, call.layout), lse
