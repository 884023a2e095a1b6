"""The softmax as the Hopper forward computes it, block of scores by block, in the registers of a warpgroup.

Of an accumulator [64, N] of wgmma a thread has N / 2 numbers: of two rows, 8 apart, in turn two neighbouring columns
every 8, from 2 (lane % 4) on. PTX that works on all of a thread's numbers at once counts on that order.
"""

from powertrain.ops.attention.hopper.primitives import LN2, LOG2E, MINUS_INF, tanh
from powertrain.runtime.gluon_compat import gl, gluon

# By how much, in base 2, a row's greatest score may exceed the maximum that weights are relative to. At the maximum a
# weight is 1 and not rounded; one above it is, and if it is nearly all of the row, so is the result. Such a weight is
# at most 2^GROWTH / (1 + 2^GROWTH) of its row. Largest error in parts of xFormers' tolerance, of 7 million results of
# inputs with deviation 3 (an emulation), with 0, 1, 2, 4, 8: float16 0.55, 0.63, 0.81, 0.92, 1.02, bfloat16 0.62,
# 0.69, 0.82, 0.95, 0.95. Of 63 blocks after the first, a warp scales its results at 29, 13, 6, 0, 0.
GROWTH = gl.constexpr(1.0)


@gluon.jit
def _columns(start, s):
    return start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))


@gluon.jit
def apply_softcap_alibi(s, start, positions, factors, slope, p_first, CAP: gl.constexpr, ALIBI: gl.constexpr):
    """Scores in base 2, but for the factor where there is neither softcap nor ALiBi."""
    if CAP:
        s = tanh(s * factors.inner) * factors.outer
    elif ALIBI != "none":
        s = s * factors.inner
    if ALIBI == "two_sided":
        far = gl.expand_dims(positions, 1) - gl.expand_dims(_columns(start, s), 0)
        s -= slope * gl.abs(far).to(gl.float32)
    if ALIBI == "one_sided":
        s += gl.expand_dims(slope * (_columns(start, s) - p_first).to(gl.float32), 0)
    return s


def _hiding(count: int, has_first: bool, hidden: str = "0fFF800000") -> str:
    """PTX: `hidden`, -inf, in place of a thread's scores in columns behind `last` or before `first` of their rows."""
    out, s, last, first = (range(n * count, (n + 1) * count) for n in range(4))
    lines = [
        "{ .reg .pred p;",
        ".reg .s32 lane, last<2>, first<2>;",
        "mov.u32 lane, %laneid;",
        "and.b32 lane, lane, 3;",
        "shl.b32 lane, lane, 1;",
    ]
    for row in range(2):
        lines.append(f"sub.s32 last{row}, ${last[2 * row]}, lane;")
        if has_first:
            lines.append(f"sub.s32 first{row}, ${first[2 * row]}, lane;")
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        lines.append(f"setp.ge.s32 p, last{row}, {column};")
        if has_first:
            lines.append(f"setp.le.and.s32 p, first{row}, {column}, p;")
        lines.append(f"selp.f32 ${out[i]}, ${s[i]}, {hidden}, p;")
    return "\n".join([*lines, "}"])


def _operands(count: int, scores: int, rows: int = 0) -> str:
    """Constraints of `count` results, as many scores times `scores`, as many integers times `rows`."""
    return ",".join(["=f"] * count + ["f"] * (scores * count) + ["r"] * (rows * count))


_HIDING = gl.constexpr({(count, left): _hiding(count, left) for count in (16, 32, 64) for left in (False, True)})
_HIDING_OPERANDS = gl.constexpr(
    {(count, left): _operands(count, 1, 1 + left) for count in (16, 32, 64) for left in (False, True)}
)


_ZEROING = gl.constexpr(_hiding(32, True, "0f00000000"))


@gluon.jit
def zero_outside(p, first, last):
    """`p` [rows, 64] with zeros in columns before `first` or behind `last` of each row, [rows]. By the compiler it were
    twice the instructions, and registers that the Hopper backward does not have."""
    COUNT: gl.constexpr = p.shape[1] // 2
    return gl.inline_asm_elementwise(
        _ZEROING,
        _HIDING_OPERANDS[COUNT, True],
        [p, gl.expand_dims(last, 1), gl.expand_dims(first, 1)],
        dtype=gl.float32,
        is_pure=True,
        pack=COUNT,
    )


@gluon.jit
def apply_mask(s, start, positions, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores of keys that a query does not see: -inf. By the compiler it were three times the instructions."""
    COUNT: gl.constexpr = s.shape[1] // 2
    last = positions * 0 + k_len - 1
    if RIGHT:
        last = gl.minimum(last, positions + right)
    last = gl.expand_dims(last - start, 1)
    if LEFT:
        first = gl.expand_dims(positions - left - start, 1)
        s = gl.inline_asm_elementwise(
            _HIDING[COUNT, True],
            _HIDING_OPERANDS[COUNT, True],
            [s, last, first],
            dtype=gl.float32,
            is_pure=True,
            pack=COUNT,
        )
    else:
        s = gl.inline_asm_elementwise(
            _HIDING[COUNT, False],
            _HIDING_OPERANDS[COUNT, False],
            [s, last],
            dtype=gl.float32,
            is_pure=True,
            pack=COUNT,
        )
    return s


@gluon.jit
def partial_row_sums(p):
    """Sums over each thread's own columns, added up over threads at the end: [rows, 4]."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax(s, m, l, factor, MASKED: gl.constexpr):  # noqa: E741
    """(weights, m, l, the factor of the result so far)."""
    # until it grows by more than GROWTH, the results so far need no scaling
    m_new = gl.max(s, 1)
    m_new = gl.where((m_new - m) * factor > GROWTH, m_new, m)
    shift = m_new * factor
    if MASKED:
        # nothing seen so far: 2^-inf is 0, not NaN
        shift = gl.where(m_new == MINUS_INF, 0.0, shift)
    p = gl.exp2(s * factor - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m * factor - shift)
    sums = partial_row_sums(p)
    of_l = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
    return p, m_new, l * gl.expand_dims(of_l, 1) + sums, alpha


@gluon.jit
def to_p16(p, dtype: gl.constexpr):
    """`p` in 16 bits, two neighbouring columns in an int32: [rows, columns / 2].

    Carried from block to block as numbers of 16 bits, the compiler takes each pair apart and puts it together again."""
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    return pairs


@gluon.jit
def as_operand(pairs, v_smem, o):
    """`to_p16` weights as the left operand of a product with v, to be added to `o`."""
    dtype: gl.constexpr = v_smem.dtype
    o_layout: gl.constexpr = o.type.layout
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    p = gl.join(even, odd).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def beside_zeros(pairs, s_layout: gl.constexpr):
    """`to_p16` weights of half a block, and zeros for its other half."""
    ROWS: gl.constexpr = pairs.shape[0]
    COLS: gl.constexpr = pairs.shape[1]
    like = to_p16(gl.zeros([ROWS, 4 * COLS], gl.float32, s_layout), gl.bfloat16)
    whole = gl.join(pairs, gl.zeros_like(pairs)).permute(0, 2, 1).reshape([ROWS, 2 * COLS])
    return gl.convert_layout(whole, like.type.layout)


def _rescaling(count: int) -> str:
    """PTX: `count` numbers times as many factors, unless these are 1 in the whole warp."""
    outs, ins, by = (range(first, first + count) for first in (0, count, 2 * count))
    return "\n".join([
        "{ .reg .pred p, q;",
        *(f"mov.f32 ${out}, ${x};" for out, x in zip(outs, ins, strict=True)),
        # a thread has two rows, and of each two columns in turn
        f"setp.neu.f32 p, ${by[0]}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${by[2]}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        "@!q bra DONE;",
        *(f"mul.f32 ${out}, ${out}, ${factor};" for out, factor in zip(outs, by, strict=True)),
        "DONE: }",
    ])  # fmt: skip


_RESCALING = gl.constexpr({count: _rescaling(count) for count in (8, 16, 32, 64, 128)})
_RESCALING_OPERANDS = gl.constexpr({count: _operands(count, 2) for count in (8, 16, 32, 64, 128)})


@gluon.jit
def rescale_o(o, alpha):
    """`o` times a factor per row, [rows, 1]: seldom another than 1, and then most warps skip it."""
    COUNT: gl.constexpr = o.shape[1] // 2
    return gl.inline_asm_elementwise(
        _RESCALING[COUNT],
        _RESCALING_OPERANDS[COUNT],
        [o, alpha],
        dtype=gl.float32,
        is_pure=True,
        pack=COUNT,
    )


@gluon.jit
def by_row(x, o):
    """A number for each row, beside the columns of `o`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def end_of_softmax(m, total, slope, factor, sinks, lane, rows, sizes, CONFIG: gl.constexpr):
    """Of each row of a tile its LSE, natural, and the factor of its result: one by the softmax's denominator.

    `total` is the sum of a row's weights; `lane` its head behind the first of `rows`."""
    ROWS: gl.constexpr = m.shape[0]
    row_layout: gl.constexpr = total.type.layout
    head, heads = rows.head, sizes.heads
    m = m * factor
    if CONFIG.alibi == "one_sided":
        m -= slope * gl.arange(0, ROWS, row_layout).to(gl.float32)
    rescale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    if sinks is not None:
        if CONFIG.heads_per_tile == 1:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        else:
            sink = gl.load(sinks + head + lane, mask=head + lane < heads, other=0.0).to(gl.float32) * LOG2E
        with_sink = gl.maximum(m, sink)
        rescale = gl.exp2(m - with_sink)
        weight = gl.exp2(sink - with_sink)
        # a sink counts once, though every split sees it
        if sizes.num_splits is not None:
            weight = gl.where(rows.split == 0, weight, 0.0)
        # the combination of parts counts it
        if CONFIG.listed:
            weight = gl.where(rows.slot_of_part < 0, weight, 0.0)
        total = total * rescale + weight
        m = with_sink
    # a row that sees no key has a total of 0: its LSE is -inf and its result 0, not NaN. A total of NaN stays NaN: the
    # combination of parts and the backward leave out rows whose LSE is -inf
    lse = gl.where(total != 0, (m + gl.log2(gl.where(total != 0, total, 1.0))) * LN2, MINUS_INF)
    inverse = gl.where(total != 0, rescale / gl.where(total != 0, total, 1.0), 0.0)
    return lse, inverse
