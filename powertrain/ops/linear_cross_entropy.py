"""Cross entropy of `x @ weight.T + bias` against a target, without storing the logits.

    logits = x weightᵀ + bias;   loss and dlogits as in cross_entropy.py
    dx = dlogits weight;   dweight = dlogitsᵀ x;   dbias = sum over rows of dlogits

"mean" and "sum": forward walks over blocks of rows. A block's logits are turned into its dlogits in place, which give
its rows of dx and its part of dweight at once; backward only hands the two out, times dloss. Three GEMMs of 2*T*D*V
operations in all, by cuBLAS. Saved: dx [T, D] and dweight [V, D].
"none": every token's dloss is known only in backward, which makes the logits once more, block by block of the
vocabulary, so that each block's dweight is complete at once: four GEMMs. Saved: the inputs and lse [T].

Scratch: about 300 MiB of logits (8192 x 128256 bf16 whole: 2004 MiB), but those of 1024 rows at least with gradients,
of 2048 with dweight (half of dweight's own size where x has 4096 columns, all of it where 2048). More blocks would cost
more than they save: each reads and writes all of dweight, and rounds it once if it is not float32, so there are at most
16 of them.

Sources: Wijmans et al., arXiv:2411.09009; gradient in forward by row blocks after mgmalek/efficient_cross_entropy;
accumulation into main_grad after Megatron-LM's gradient_accumulation_fusion.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from powertrain.ops.cross_entropy import (
    Reduction,
    check_loss_arguments,
    cross_entropy_ref,
    cross_entropy_torch,
    early_scale,
    late_scale,
    refuse_second_backward,
    scale_op,
)
from powertrain.ops.cross_entropy_kernels import (
    Terms,
    launch_dlogits,
    launch_losses,
    launch_mean_scale,
    launch_row_stats,
)
from powertrain.ops.gemm.odd_widths import is_slow, wide_linear
from powertrain.ops.shapes import acc_dtype, as_flat, as_rows, cdiv, empty, wanted
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, cast_by_autocast, falls_back, use_kernel, wants_grad
from powertrain.runtime.flops import Shape
from powertrain.runtime.launch import kernel
from powertrain.runtime.plain_calls import plain

# of logits at a time. 8192 x 4096 x 128256 bf16 on an H200, ms and peak MiB: 160 MiB 43.1, 1223; 256 42.0, 1317; 300
# 40.6, 1379; 512 41.6, 1567
SCRATCH_BYTES = 300 << 20
# ms and MiB, one H200, by rows of a block, 1024, 2048, 4096, 8192 (torch.compile): 8192 x 4096 x 128256 40.2 1317, 39.3
# 1567, 38.9 2068, 38.1 3070 (39.2 4008); 8192 x 2048 x 128256 20.7 784, 19.7 1035, 19.5 1536, 19.3 2538 (20.7 4008);
# 3000 x 2048 x 256000 14.8 1512, 14.3 1762, 14.4 2477, 14.1 2477 (15.2 2930)
MIN_ROW_BLOCK, MIN_ROW_BLOCK_OF_DWEIGHT = 1024, 2048
MAX_ROUNDINGS = 16  # of a 16-bit dweight: row blocks
MIN_VOCAB_BLOCK = 1024  # narrower GEMMs are slow


def linear_cross_entropy_ref(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The specification of `linear_cross_entropy`, in plain PyTorch; options are those of `cross_entropy_ref`."""
    return cross_entropy_ref(F.linear(x, weight, bias), target, **options)


@kernel(aligned=("N",), unaligned=("grad_ptr", "scale_ptr"))
def _accumulate_kernel(total_ptr, part_ptr, grad_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    """total += part * grad * scale, flat."""
    factor = tl.load(grad_ptr).to(tl.float32)  # scalar
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr)  # scalar
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(total_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)  # [BLOCK]
    part = tl.load(part_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(total_ptr + offsets, (total + part * factor).to(total_ptr.dtype.element_ty), mask=offsets < N)  # [BLOCK]


def _accumulate_(total: Tensor, part: Tensor, dloss: Tensor, scale: Tensor | None) -> None:
    N = total.numel()
    _accumulate_kernel[(cdiv(N, 2048),)](total, part, dloss, scale, N, BLOCK=2048, num_warps=4)


def blocks_within_scratch(total: int, others: int, element_size: int, least: int = 1) -> list[slice]:
    """[0, total) in equal blocks of about SCRATCH_BYTES, each index standing for `others` elements."""
    fits = max(least, SCRATCH_BYTES // max(1, others * element_size))
    count = max(1, -(-total // fits))
    # one block more where the last would be short: 8192 rows as 8 of 1024 rather than 6 of 1280 and one of 512
    counts = (n for n in (count, count + 1) if n == count or total >= n * least)
    size = min((_rounded(-(-total // n)) for n in counts), key=lambda size: -total % size > size // 4)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _rounded(size: int) -> int:
    """Multiples of 128, or of 4: a block of a vector of int32 or float32 then begins at 16 bytes."""
    return -(-size // 128) * 128 if size > 128 else -(-size // 4) * 4 if size > 4 else max(1, size)


def aligned_blocks(blocks: list[slice]) -> list[slice]:
    """The same, columns after the last multiple of 64 as a block of their own.

    cuBLAS is slow where a dim itself is odd, though its rows are aligned. One H200, logits [8192, 50257] of 4096 bf16:
    34.1 ms in one product, 5.0 in two; with gradients 65.4 and 18.4 (linear_log_probs).
    """
    last = blocks[-1]
    cut = last.stop - last.stop % 64
    if cut in (last.stop, last.start) or cut < last.start:
        return blocks
    return [*blocks[:-1], slice(last.start, cut), slice(cut, last.stop)]


def new_scratch(x: Tensor, rows: int, cols: int) -> Tensor:
    """[rows, cols], each row 16-byte aligned: cuBLAS is several times slower on rows that are not."""
    # oneDNN's bfloat16 products on a CPU with AMX multiply what lies behind a row by 0, which is NaN where that is NaN
    make = x.new_zeros if x.device.type == "cpu" else x.new_empty
    return make((rows, -(-cols // 64) * 64))[:, :cols]


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a b, or out += a b; out may be float32 beside 16-bit a and b."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    # cuBLAS adds 16-bit products to float32 itself: no float32 copy of a or b
    elif a.device.type == "cuda" and add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    elif a.device.type == "cuda":
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        # CPU products have no out_dtype
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


def logits_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    for cols in aligned_blocks([slice(0, weight.shape[0])]):
        rows = weight[cols].t()
        torch.mm(x, rows, out=out[:, cols]) if bias is None else torch.addmm(bias[cols], x, rows, out=out[:, cols])
    return out


def whole_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., D] times weight [V, D] transposed, plus bias: F.linear's result [..., V]. Where that is slow for its V,
    as with 50257 words, it is the first V columns of a wider tensor."""
    V, lead = weight.shape[0], x.shape[:-1]
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != (V,)):
        # PyTorch raises the error: padding would make the wrong size fit
        return F.linear(x, weight, bias)
    if is_slow(x, weight) and not wants_grad(x, weight, bias):
        x, weight, bias = cast_by_autocast(x, weight, bias)
        rows = as_rows(x)
        return logits_into(rows, weight, bias, new_scratch(x, rows.shape[0], V)).view(*lead, V)
    return wide_linear(x, weight, bias)


def _linear_cross_entropy_fwd_outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    main_grad: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, none = x.shape[0], reduction == "none"
    loss = x.new_empty((T,) if none else (), dtype=torch.float32)
    lse = loss.new_empty(T)
    scale = loss.new_empty(() if reduction == "mean" else 0)
    dx = x.new_empty(x.shape) if need_dx and not none else empty(x)
    dw_dtype = weight.dtype if main_grad is None else main_grad.dtype
    dw = weight.new_empty(weight.shape, dtype=dw_dtype) if need_dw and not none else empty(x)
    db = bias.new_empty(bias.shape) if need_db and bias is not None and not none else empty(x)
    return loss, lse, scale, dx, dw, db


def _linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    main_grad: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _linear_cross_entropy_fwd_outputs(
        x, weight, bias, target, main_grad,
        ignore_index, reduction, label_smoothing, z_loss, softcap, need_dx, need_dw, need_db,
    )  # fmt: skip
    loss, lse, scale, dx, dw, db = outputs
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)
    T, V = x.shape[0], weight.shape[0]
    target_logit = lse.new_empty(lse.shape)
    logit_sum = lse.new_empty(lse.shape) if label_smoothing else None
    mean_scale = scale if reduction == "mean" else None
    makes_grads = reduction != "none" and (need_dx or need_dw or need_db)
    if makes_grads and mean_scale is not None:
        launch_mean_scale(target, terms, mean_scale)
    # float32 over all blocks, rounded once
    db_sum = db.new_zeros(V, dtype=torch.float32) if makes_grads and need_db else None

    # each block of rows rounds dw once, so there are at most MAX_ROUNDINGS blocks
    rounds = makes_grads and need_dw and dw.dtype is not torch.float32
    least = (MIN_ROW_BLOCK_OF_DWEIGHT if need_dw else MIN_ROW_BLOCK) if makes_grads else 1
    least = max(least, -(-T // MAX_ROUNDINGS) if rounds else 1)
    blocks = blocks_within_scratch(T, V, x.element_size(), least=least)
    scratch, columns = (
        new_scratch(x, max((b.stop - b.start for b in blocks), default=0), V),
        aligned_blocks([slice(0, V)]),
    )
    for rows in blocks:
        logits = logits_into(x[rows], weight, bias, scratch[: rows.stop - rows.start])
        launch_row_stats(
            logits, target[rows], terms, lse[rows], target_logit[rows], None if logit_sum is None else logit_sum[rows],
            # the gradient overwrites the logits: one scratch serves both
            scale=early_scale(x.dtype, mean_scale), dlogits=logits if makes_grads else None,
        )  # fmt: skip
        # the few last columns first: dx is rounded before the others are added to it
        for cols in reversed(columns) if makes_grads else ():
            if need_dx:
                matmul_into(logits[:, cols], weight[cols], dx[rows], add=cols.stop < V)
            if need_dw:
                matmul_into(logits[:, cols].t(), x[rows], dw[cols], add=rows.start > 0)
        if db_sum is not None:
            db_sum += logits.sum(0, dtype=torch.float32)
    # no token: nothing was added to dw, whose memory is not initialized
    if not blocks:
        dw.zero_()
    if db_sum is not None:
        db.copy_(db_sum)
    out = dict(losses=loss) if reduction == "none" else dict(loss=loss)
    launch_losses(lse, target_logit, logit_sum, target, terms, V, scale=mean_scale, **out)
    return outputs


def _linear_cross_entropy_bwd_outputs(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    main_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape) if need_dx else empty(x)
    dw = weight.new_empty(weight.shape) if need_dw and main_grad is None else empty(x)
    return dx, dw, bias.new_empty(bias.shape) if need_db and bias is not None else empty(x)


def _linear_cross_entropy_bwd(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    main_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of reduction "none"."""
    outputs = _linear_cross_entropy_bwd_outputs(
        dloss, x, weight, bias, target, lse, main_grad,
        ignore_index, label_smoothing, z_loss, softcap, need_dx, need_dw, need_db,
    )  # fmt: skip
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap)

    def make_dlogits(logits: Tensor, cols: slice) -> None:
        where = dict(vocab_start=cols.start, vocab_size=weight.shape[0])
        launch_dlogits(logits, target, lse, dloss, terms, logits, scale=None, **where)

    grads_by_vocab_blocks(make_dlogits, x, weight, bias, outputs, main_grad, (need_dx, need_dw, need_db))
    return outputs


def grads_by_vocab_blocks(
    make_dlogits: Callable[[Tensor, slice], None],  # (logits [T, cols], cols): overwrites the logits
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],  # dx, dw, db: written
    main_grad: Tensor | None,  # dw is added here instead
    needs: tuple[bool, bool, bool],
    *,
    other_logits: int = 0,  # that make_dlogits keeps beside a block of logits
    kept: Tensor | None = None,  # the logits [T, V], which are copied; None: they are made once more
) -> None:
    """Gradients of `x weightᵀ + bias` from its dlogits, one block of the vocabulary at a time."""
    (dx, dw, db), (need_dx, need_dw, need_db) = grads, needs
    T, V = x.shape[0], weight.shape[0]
    blocks = aligned_blocks(blocks_within_scratch(V, T * (1 + other_logits), x.element_size(), least=MIN_VOCAB_BLOCK))
    # blocks of the vocabulary add up in dx: in float32, so that it is rounded once
    dx_sum = dx if len(blocks) == 1 else torch.empty_like(dx, dtype=acc_dtype(dx.dtype))
    scratch = new_scratch(x, T, blocks[0].stop)
    for cols in blocks:
        logits = scratch[:, : cols.stop - cols.start]
        if kept is not None:
            logits.copy_(kept[:, cols])
        else:
            logits_into(x, weight[cols], None if bias is None else bias[cols], logits)
        make_dlogits(logits, cols)
        if need_dx:
            matmul_into(logits, weight[cols], dx_sum, add=cols.start > 0)
        if need_dw:
            matmul_into(logits.t(), x, (dw if main_grad is None else main_grad)[cols], add=main_grad is not None)
        if need_db:
            db[cols] = logits.sum(0, dtype=acc_dtype(x.dtype))
    if need_dx and dx_sum is not dx:
        dx.copy_(dx_sum)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, ctx.main_grad, ignore_index, ctx.reduction, *terms = inputs
    _, lse, scale, dx, dw, db = output
    ctx.terms = (ignore_index, *terms[:3])
    ctx.used = False
    ctx.save_for_backward(*((x, weight, bias, target, lse) if ctx.reduction == "none" else (scale, dx, dw, db)))
    # outputs only so that a traced graph can save them
    ctx.mark_non_differentiable(lse, scale, dx, dw, db)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 13
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    if ctx.reduction == "none":
        op = _linear_cross_entropy_bwd_op if ctx.main_grad is None else _linear_cross_entropy_bwd_into_op
        x, weight, bias, target, lse = ctx.saved_tensors
        grads = op(dloss, x, weight, bias, target, lse, ctx.main_grad, *ctx.terms, need_dx, need_dw, need_db)
        dx, dw, db = grads if ctx.main_grad is None else (grads[0], None, grads[1])
    else:
        refuse_second_backward(ctx, "linear_cross_entropy", 'reduction="none"')
        scale, dx, dw, db = ctx.saved_tensors
        late = late_scale(dx.dtype, scale if ctx.reduction == "mean" else None)
        for grad in (dx, db) if ctx.main_grad is not None else (dx, dw, db):
            if grad.numel():
                scale_op(grad, dloss, late)
        if ctx.main_grad is not None and need_dw:
            _accumulate_op(ctx.main_grad, dw, dloss, late)
    dw = None if ctx.main_grad is not None else wanted(dw, need_dw)
    return (wanted(dx, need_dx), dw, wanted(db, need_db), *(None,) * 10)


def _bwd_into(*args: Any) -> tuple[Tensor, Tensor]:
    dx, _, db = _linear_cross_entropy_bwd(*args)
    return dx, db


def _bwd_into_outputs(*args: Any) -> tuple[Tensor, Tensor]:
    dx, _, db = _linear_cross_entropy_bwd_outputs(*args)
    return dx, db


def _fwd_flops(x: Shape, weight: Shape, reduction: str, need_dx: bool, need_dw: bool, **_: Any) -> int:
    """The logits; with a reduction the gradients too, which backward only scales."""
    return 2 * x[0] * prod(weight) * (1 + (need_dx + need_dw) * (reduction != "none"))


def _bwd_flops(x: Shape, weight: Shape, need_dx: bool, need_dw: bool, **_: Any) -> int:
    return 2 * x[0] * prod(weight) * (1 + need_dx + need_dw)


_TERMS = "float label_smoothing, float z_loss, float softcap, bool need_dx, bool need_dw, bool need_db"
_linear_cross_entropy_op = Op(
    "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? main_grad, "
    f"int ignore_index, str reduction, {_TERMS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_cross_entropy_fwd,
    _linear_cross_entropy_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=_fwd_flops,
)
_BWD = "Tensor dloss, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse"
_linear_cross_entropy_bwd_op = Op(
    f"linear_cross_entropy_bwd({_BWD}, Tensor? main_grad, int ignore_index, {_TERMS}) -> (Tensor, Tensor, Tensor)",
    _linear_cross_entropy_bwd,
    _linear_cross_entropy_bwd_outputs,
    flops=_bwd_flops,
)
_linear_cross_entropy_bwd_into_op = Op(
    f"linear_cross_entropy_bwd_into({_BWD}, Tensor(a!) main_grad, int ignore_index, {_TERMS}) -> (Tensor, Tensor)",
    _bwd_into,
    _bwd_into_outputs,
    flops=_bwd_flops,
)
_accumulate_op = Op(
    "accumulate_(Tensor(a!) total, Tensor part, Tensor dloss, Tensor? scale) -> ()",
    _accumulate_,
    lambda total, part, dloss, scale: None,
)


@falls_back("linear_cross_entropy")
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Cross entropy of `x @ weight.T + bias` against `target`, without storing the logits.

    Shapes: D hidden size, V vocabulary size, any leading dims, T tokens in all.
        x          [..., D]  float32, float16 or bfloat16 (float64 on the CPU)
        weight     [V, D]    same dtype as x; under autocast both are cast to its dtype, this being a matmul
        target     [...]     int64 or int32 in [0, V), or `ignore_index` to leave a token out
        bias       [V]       same dtype as x, or None
        main_grad  [V, D]    float32, contiguous, or None: backward adds the weight's gradient here, and weight.grad
                             stays None (Megatron's gradient accumulation)
        The other options are those of `cross_entropy`.
    Returns the loss in nats, float32 (float64 for float64): [] for "mean" and "sum", [...] for "none". A target out of
        range gives nan from the kernels and an error from plain PyTorch (CPU).
    Numerics: as plain PyTorch in x's dtype, whose logits and dlogits are rounded to that dtype too. dweight is rounded
        once a block of rows (16 at most), or not at all into main_grad. Deterministic. No host synchronisation.
    Memory: about 300 MiB of logits at a time, but those of 1024 rows at least, of 2048 if weight has a gradient; for
        "mean" and "sum" dx and dweight (float32 beside main_grad) are made in forward and kept for backward, which
        hands these very buffers out. Nothing for an input that is frozen.
    Raises ValueError naming argument, expected and given value. A second backward of "mean" and "sum" is a
        RuntimeError. Double backward and vmap are not implemented and say so.
    Source: Wijmans et al., arXiv:2411.09009; row blocks after mgmalek/efficient_cross_entropy.
    """
    op = "linear_cross_entropy"
    x, weight, bias = cast_by_autocast(x, weight, bias)
    check_loss_arguments(op, target, reduction, label_smoothing, z_loss, softcap)
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.same_device(op, "x", x, weight=weight, bias=bias, target=target, main_grad=main_grad)
    checks.shape(op, "weight", weight, (*weight.shape[:1], x.shape[-1]), "[V, last dim of x]")
    checks.shape(op, "target", target, x.shape[:-1], "x without the last dim")
    checks.shape(op, "bias", bias, weight.shape[:1], "first dim of weight")
    checks.shape(op, "main_grad", main_grad, weight.shape, "shape of weight")
    checks.same_dtype(op, "x", x, weight=weight, bias=bias)
    if main_grad is not None:
        good = main_grad.dtype is torch.float32 and main_grad.is_contiguous()
        checks.require(good, op, "main_grad", "be float32 and contiguous", checks.name(main_grad.dtype))
    if not use_kernel(op, x):
        options = ignore_index, reduction, label_smoothing, z_loss, softcap
        loss_of = apart_from_autocast(lambda *tensors: _loss_torch(*tensors, *options), x.device)
        return plain(loss_of, x, weight, bias, target, main_grad)
    grad = torch.is_grad_enabled()
    needs = (grad and t is not None and t.requires_grad for t in (x, weight, bias))
    loss = _linear_cross_entropy_op(
        as_rows(x), weight, bias, as_flat(target), main_grad, int(ignore_index), reduction,
        float(label_smoothing), float(z_loss), float(softcap or 0.0), *needs,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


class IntoMainGrad(torch.autograd.Function):
    """The weight itself; its gradient goes into main_grad."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(dw)
        return None, None


def _loss_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, main_grad: Tensor | None, *options: Any
) -> Tensor:
    weight = weight if main_grad is None else IntoMainGrad.apply(weight, main_grad)
    return cross_entropy_torch("linear_cross_entropy", F.linear(x, weight, bias), target, *options)
