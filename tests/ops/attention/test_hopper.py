"""The Hopper back end without a GPU: what it launches, its machine code, its self-tests. Values: tests/gpu."""

import re
import threading
import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, select, varlen_attention
from powertrain.ops.attention.backends import versions
from powertrain.ops.attention.hopper import backend as hopper_backend
from powertrain.ops.attention.hopper import plans, tile_counter
from powertrain.ops.attention.hopper.splits import Work, num_splits_for
from powertrain.runtime.compile.service import Spec, entry_for
from powertrain.runtime.compile.triton_compat import lower
from powertrain.runtime.errors import CompileError
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.ops.attention.attention_launches import META, any_order
from tests.ops.attention.machine_code import instructions

compiled = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


BATCH = 32  # more tiles of 64 rows than run at once


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _forward(d_qk: int, d_v: int, length: int, packed: bool = False, **options: Any) -> list[Spec]:
    q, k, v = (_empty(BATCH, length, 4, d) for d in (d_qk, d_qk, d_v))
    with record("sm_90") as wanted:
        if packed:
            starts = _empty(3, dtype=torch.int32)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            varlen_attention(q, k, v, starts, backend="hopper", **{"is_causal": True} | options)
        else:
            attention(q, k, v, backend="hopper", **{"is_causal": True} | options)
    return wanted.specs


# head dims, queries, packed, causal; consumers
PLANS = [
    ((128, 128), 512, False, True, 2),
    ((128, 128), 512, True, True, 2),
    ((128, 128), 512, False, False, 2),
    ((64, 64), 512, False, True, 2),
    ((64, 64), 8192, False, True, 3),
    ((192, 128), 512, False, True, 2),
    ((256, 256), 512, True, True, 2),
    ((96, 96), 512, False, True, 2),
    ((72, 80), 512, True, False, 2),
    ((160, 160), 512, False, False, 2),
    ((192, 192), 512, False, True, 2),
    ((128, 128), 513, False, False, 2),
    ((64, 64), 1058, False, False, 2),
    ((64, 64), 12050, False, False, 3),
    ((80, 80), 150, False, False, 2),
    ((192, 192), 600, False, False, 2),
]


class _Products(NamedTuple):
    """Instructions of one consumer: `blocks` pairs of products and two waits each, in loops and beside them."""

    waits: int
    multiplications: int

    @staticmethod
    def of(blocks: int, scores: int, products: int) -> "_Products":
        # before the first tile: scores and a wait; after a tile's last block: a product and the next tile's scores
        return _Products(1 + 2 * blocks + 2, scores + blocks * (scores + products) + products + scores)


def _expected(constants: Mapping[str, Any]) -> _Products:
    """Of all consumers. Diagonal: no loop with masks; the first consumer's second block has half a product beside it.
    Half: no loop with masks; each consumer's second block has."""
    scores = sum(constants["P_QK"]) // 16
    products = constants["BLOCK_N"] // 16 * len(constants["P_V"])
    # of all but the first, behind a tile that has none of its rows: the next tile's scores
    passing = constants["CONSUMERS"] - 1
    if constants["FIRST_BLOCK"] == "diagonal":
        first, second = (_Products.of(blocks, scores, products) for blocks in (2, 1))
        multiplications = first.multiplications + second.multiplications - products // 2
        return _Products(first.waits + second.waits + passing, multiplications + passing * scores)
    each = _Products.of(2, scores, products)
    multiplications = each.multiplications - (products // 2 if constants["FIRST_BLOCK"] == "half" else 0)
    return _Products(
        constants["CONSUMERS"] * each.waits + passing, constants["CONSUMERS"] * multiplications + passing * scores
    )


@compiled
@pytest.mark.parametrize("dims, length, packed, causal, consumers", PLANS, ids=lambda x: str(x).replace(" ", ""))
def test_products_are_not_serialised(
    dims: tuple[int, int], length: int, packed: bool, causal: bool, consumers: int
) -> None:
    """ptxas waits after every wgmma where it runs out of registers; what is spilled between tiles costs little."""
    [spec] = _forward(*dims, length, packed, is_causal=causal)
    assert spec.constants["CONSUMERS"] == consumers
    key_block = spec.constants["BLOCK_N"]
    if causal:
        first_block = "diagonal" if consumers == 2 and key_block == 128 else "any"
    else:
        first_block = "half" if not packed and 0 < length % key_block <= key_block // 2 else "any"
    assert spec.constants["FIRST_BLOCK"] == first_block
    entry, _ = entry_for(spec)
    assert entry.manifest["launch"]["stack"] <= 128
    assert entry.manifest["launch"]["num_warps"] == 4 * consumers + 4
    ptx = zlib.decompress(entry.members["ptx"]).decode()
    assert f"wgmma.mma_async.sync.aligned.m64n{key_block}k16.f32.bf16.bf16" in ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global", ptx)
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in ptx
    code = instructions(entry.members["cubin"])
    assert (code["WARPGROUP.DEPBAR"], code["HGMMA"]) == _expected(spec.constants)
    if not packed:
        # halves of registers put together: weights carried from block to block in 16 bits were packed anew each time
        assert code["PRMT"] <= 4


def _expected_d512(p_qk: list[int], p_v: list[int]) -> _Products:
    """Of both consumers: the first has a step ahead of its loop, whose block has none before it."""
    waits = multiplications = 0
    for steps, values in ((2, p_v[:2]), (1, p_v[2:])):
        # of each loop's step the block before and its own, then the other's last block; a wait for each chunk
        products = 2 * steps + (0 if steps == 2 else 1)
        waits += steps * len(p_qk) + products * len(values)
        multiplications += steps * sum(p_qk) // 16 + products * 4 * len(values)
    return _Products(waits, multiplications)


@compiled
@pytest.mark.parametrize(
    "dims, packed, causal",
    [((512, 512), False, True), ((512, 512), True, True), ((384, 384), False, False), ((264, 448), False, True)],
)
def test_products_above_256_are_not_serialised(dims: tuple[int, int], packed: bool, causal: bool) -> None:
    [spec] = _forward(*dims, 512, packed, is_causal=causal)
    assert "_hopper_attention_fwd_d512_kernel" in spec.describe()
    entry, _ = entry_for(spec)
    assert entry.manifest["launch"]["stack"] <= 128
    assert entry.manifest["launch"]["num_warps"] == 12
    code = instructions(entry.members["cubin"])
    p_v = [*spec.constants["P_V_LEFT"], *spec.constants["P_V_RIGHT"]]
    assert (code["WARPGROUP.DEPBAR"], code["HGMMA"]) == _expected_d512(spec.constants["P_QK"], p_v)


@compiled
@pytest.mark.parametrize("dims, packed, causal", [((64, 64), False, True), ((192, 128), False, True),
                                                  ((256, 256), True, False)])  # fmt: skip
def test_products_of_small_tiles_are_not_serialised(dims: tuple[int, int], packed: bool, causal: bool) -> None:
    q, k, v = (_empty(2, 200, 4, d) for d in (dims[0], *dims))
    with record("sm_90") as wanted:
        if packed:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            varlen_attention(q, k, v, _empty(3, dtype=torch.int32), is_causal=causal, backend="hopper")
        else:
            attention(q, k, v, is_causal=causal, backend="hopper")
    _assert_products(wanted.specs, warps=4)


def _assert_products(specs: list[Spec], warps: int) -> None:
    """Of one consumer of so many warps."""
    assert specs[0].constants["CONSUMERS"] == 1
    entry, _ = entry_for(specs[0])
    assert entry.manifest["launch"]["stack"] <= 128
    assert entry.manifest["launch"]["num_warps"] == warps + 4
    code = instructions(entry.members["cubin"])
    assert (code["WARPGROUP.DEPBAR"], code["HGMMA"]) == _expected(specs[0].constants)


def _few_queries(batch: int, queries: int, keys: int, heads: tuple[int, int] = (32, 8), **options: Any) -> list[Spec]:
    q, k = _empty(batch, queries, heads[0], 128), _empty(batch, keys, heads[1], 128)
    with record("sm_90") as wanted:
        attention(q, k, k, backend="hopper", **{"is_causal": True} | options)
    return wanted.specs


def _packed_and_cut(specs: list[Spec]) -> tuple[int, bool]:
    pack, cut = (specs[0].constants[name] for name in ("HEADS_PER_TILE", "SPLIT_KV"))
    assert _names(specs) == {"_hopper_attention_fwd_kernel"} | ({"_combine_kernel"} if cut else set())
    return pack, cut


@compiled
@pytest.mark.parametrize(
    "batch, queries, heads, cut, warps",
    [(2, 16, 4, True, 4), (1, 1, 4, True, 4), (16, 16, 4, False, 4), (8, 64, 2, False, 8), (4, 37, 2, True, 8)],
)
def test_products_of_few_queries_are_not_serialised(
    batch: int, queries: int, heads: int, cut: bool, warps: int
) -> None:
    specs = _few_queries(batch, queries, 4096)
    assert _packed_and_cut(specs) == (heads, cut)
    _assert_products(specs, warps)


@compiled
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_products_of_shared_code_are_not_serialised(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = plans.with_consumers(plans.plan_for(head_dim, head_dim, 64), 1, warps=8)
    monkeypatch.setattr(plans, "plans_of_few", lambda plan, *_: (shared,))
    q, k = (_empty(4, n, 8, head_dim) for n in (64, 4096))
    with record("sm_90") as wanted:
        attention(q, k, k, is_causal=True, backend="hopper")
    _assert_products(wanted.specs, warps=8)


@compiled
def test_what_is_packed_and_cut() -> None:
    assert _packed_and_cut(_few_queries(1, 16, 4096)) == (4, True)
    assert _packed_and_cut(_few_queries(8, 64, 4096)) == (2, False)
    assert _packed_and_cut(_few_queries(1, 128, 4096)) == (1, True)
    assert _packed_and_cut(_few_queries(1, 128, 512)) == (1, False)  # not few
    assert _packed_and_cut(_few_queries(4, 2048, 2048)) == (1, False)
    assert _packed_and_cut(_few_queries(1, 64, 32768, is_causal=False, window_size=(200, 0))) == (1, False)
    assert _packed_and_cut(_few_queries(2, 16, 4096, (56, 8))) == (7, True)
    assert _packed_and_cut(_few_queries(8, 16, 4096, (56, 8))) == (7, False)  # the memory is busy without
    assert _packed_and_cut(_few_queries(8, 16, 4096, (37, 1))) == (8, True)  # three are missing in the last tile
    assert _packed_and_cut(_few_queries(64, 16, 200, (37, 1))) == (8, False)  # and leave without a combination
    assert _packed_and_cut(_few_queries(8, 16, 60, (56, 8))) == (7, False)
    assert _packed_and_cut(_few_queries(64, 64, 64)) == (4, False)  # training: half as many tiles
    assert _packed_and_cut(_few_queries(8, 64, 64)) == (1, False)  # as many tiles of 64 rows as with four
    assert _packed_and_cut(_few_queries(1, 16, 32768, causal_align="top_left")) == (4, False)  # 16 keys are seen
    assert _packed_and_cut(_few_queries(1, 16, 32768, window_size=(200, -1), is_causal=False, causal_align="top_left"))[
        1
    ]
    assert _packed_and_cut(_few_queries(8, 16, 4096, alibi_slopes=torch.empty(32, device=META))) == (1, False)


def test_heads_share_a_tile_where_that_makes_fewer() -> None:
    def packs(queries: int) -> list[int]:
        return [plans.heads_per_tile_for(repeats, queries, 128) for repeats in (1, 4, 6, 7, 24, 32)]

    assert packs(1) == [1, 4, 6, 7, 24, 32]
    assert packs(96) == [1, 4, 6, 7, 8, 32]
    assert packs(128) == [1] * 6
    assert plans.heads_per_tile_for(5, 196, 128) == 1 and plans.heads_per_tile_for(5, 196, 128, most=0.95) == 5
    assert plans.heads_per_tile_for(4, 300, 128) == 4 and plans.heads_per_tile_for(4, 500, 128) == 1
    # as few tiles, with the same number of rows in each
    assert [plans.heads_per_tile_for(4, n, 128, fullest=fullest) for n in (37, 300) for fullest in (False, True)] == [
        4, 2, 4, 2,
    ]  # fmt: skip


def test_keys_are_cut_where_tiles_do_not_fill_the_sms() -> None:
    def cuts(tiles: int, blocks: int, rows: int = 2048, keys_bytes: int = 10**7) -> int:
        return num_splits_for(Work(128, tiles, blocks, 1.55, keys_bytes, rows * 128 * 4, 132, 4.8e12))

    assert [cuts(tiles, 256) for tiles in (8, 16, 64, 128, 132, 192, 264)] == [16, 8, 2, 1, 1, 2, 1]
    assert [cuts(16, blocks) for blocks in (1, 2, 8, 32)] == [1, 1, 4, 8]
    assert cuts(64, 256, rows=10**7) == 1  # what is written beside costs more
    # the memory is busy before all SMs are
    assert cuts(8, 256, keys_bytes=134 * 10**6) == 12
    # SMs would be left for 64 parts, each of which costs the second kernel a step
    assert cuts(2, 128, rows=144) == 44
    assert cuts(8, 9, rows=200) == 4  # three blocks a split, and a split without keys


@compiled
def test_rows_of_tiles_of_few_queries() -> None:
    def rows(batch: int, queries: int, keys: int, heads: int, causal: bool = False) -> int:
        q, k = (torch.empty(batch, n, heads, 64, dtype=torch.bfloat16, device="meta") for n in (queries, keys))
        with record("H200") as wanted:
            attention(q, k, k, is_causal=causal, backend="hopper")
        entry, _ = entry_for(wanted.specs[0])
        return 16 * (int(entry.manifest["launch"]["num_warps"]) - 4)

    assert rows(2, 148, 16384, 16) == 192
    assert rows(1, 2000, 8192, 12, causal=True) == 192
    assert rows(4, 160, 4096, 16) == rows(1, 1100, 8192, 12, causal=True) == 128
    assert rows(2, 64, 16384, 16) == 64  # each head's queries are one tile of 64


@compiled
def test_rows_of_tiles_where_few_run_at_once() -> None:
    def rows(batch: int, queries: int, heads: int, causal: bool, packed: bool = False) -> int:
        q = _empty(batch * queries, heads, 128) if packed else _empty(batch, queries, heads, 128)
        with record("H200") as wanted:
            if packed:
                varlen_attention(q, q, q, _empty(batch + 1, dtype=torch.int32), is_causal=causal, backend="hopper")
            else:
                attention(q, q, q, is_causal=causal, backend="hopper")
        return 64 * int(wanted.specs[0].constants["CONSUMERS"])

    assert rows(1, 128, 32, causal=False) == rows(1, 128, 32, causal=True) == 64
    assert rows(1, 300, 32, causal=True) == 64 and rows(1, 300, 32, causal=False) == 128
    assert rows(32, 31, 12, causal=False) == 64  # as few tiles of 64 rows
    assert rows(32, 31, 12, causal=False, packed=True) == 128  # a sequence may have 900 of the queries
    assert rows(4, 64, 12, causal=False, packed=True) == 64
    assert rows(1, 1300, 8, causal=False) == rows(2, 739, 28, causal=True) == 128


@compiled
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_block_has_two_barriers_of_the_warpgroup(causal: bool) -> None:
    """Its turn and one that costs nothing; stages are given back without: see _step."""
    [spec] = _forward(128, 128, 512, is_causal=causal)
    entry, _ = entry_for(spec)
    ptx = zlib.decompress(entry.members["ptx"]).decode()
    steps = re.findall(r"wgmma\.wait_group\.sync\.aligned 1;.*?wgmma\.wait_group\.sync\.aligned 0;", ptx, re.DOTALL)
    softmaxes = [step for step in steps if step.count("ex2.approx") >= 64]
    assert len(softmaxes) == (3 if causal else 4)
    assert not any("bar.sync" in step or "mbarrier.arrive" in step for step in softmaxes)


@compiled
@pytest.mark.parametrize(
    "causal, packed",
    [
        pytest.param(True, False, id="causal-dense"),
        pytest.param(False, True, id="full-packed"),
        pytest.param(True, True, id="causal-packed", marks=pytest.mark.slow),
        pytest.param(False, False, id="full-dense", marks=pytest.mark.slow),
    ],
)
def test_alibi_is_lowered(causal: bool, packed: bool) -> None:
    """No other launch without a GPU has slopes; a name that a branch of a kernel lacks shows where it is taken."""
    slopes = _empty(4, dtype=torch.float32)
    [spec] = _forward(128, 128, 512, packed, is_causal=causal, alibi_slopes=slopes)
    assert spec.constants["ALIBI"] == ("one_sided" if causal else "two_sided")
    text = lower(spec.kernel.jit, spec.signature, spec.constants, spec.aligned, spec.options, spec.arch)
    assert "ttng.warp_group_dot" in text


@compiled
def test_two_slots_of_queries_are_refused_where_two_loops_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.8 took an address computed ahead of the first loop for the second, which may be reached without it."""
    plan = plans.plan_for(128, 128, 512)._replace(q_held=False)
    monkeypatch.setattr(plans, "plan_for", lambda *sizes: plan)
    [spec] = _forward(128, 128, 512, is_causal=False)
    with pytest.raises(CompileError, match="Q_SLOTS must be 1 where q is read in two loops"):
        entry_for(spec)


def _first_block(queries: int, keys: int, batch: int = BATCH, **options: Any) -> str:
    q, k = _empty(batch, queries, 4, 128), _empty(batch, keys, 4, 128)
    with record("sm_90") as wanted:
        attention(q, k, k, backend="hopper", **{"is_causal": True} | options)
    # the combination of parts may follow
    return str(wanted.specs[0].constants["FIRST_BLOCK"])


def _aligned(queries: int, keys: int, **options: Any) -> bool:
    return _first_block(queries, keys, **options) == "diagonal"


@compiled
def test_last_blocks_of_half_the_keys() -> None:
    lengths = torch.empty(BATCH, dtype=torch.int32, device=META)
    full = {"is_causal": False}
    assert [_first_block(300, keys, **full) for keys in (256, 257, 320, 321, 384)] == [
        "any",
        "half",
        "half",
        "any",
        "any",
    ]
    assert (
        _first_block(300, 300, **full, window_size=(64, -1))
        == _first_block(300, 300, **full, seqused_k=lengths)
        == "any"
    )
    # keys in parts, whose first blocks are any
    assert _first_block(16, 32769, batch=2, **full) == "any"


@compiled
def test_diagonals_from_corner_to_corner() -> None:
    lengths = torch.empty(BATCH, dtype=torch.int32, device=META)
    assert _aligned(300, 300) and _aligned(300, 300, causal_align="top_left")
    assert _aligned(300, 556) and not _aligned(300, 557) and not _aligned(300, 430)
    assert _aligned(428, 300) and not _aligned(429, 300)
    assert _aligned(300, 999, causal_align="top_left") and not _aligned(301, 300, causal_align="top_left")
    assert not _aligned(300, 300, is_causal=False) and not _aligned(300, 300, is_causal=False, window_size=(64, 0))
    assert not _aligned(300, 300, is_causal=False, window_size=(-1, 1))
    assert not _aligned(300, 300, seqused_k=lengths) and not _aligned(300, 300, seqused_q=lengths)


@compiled
def test_packed_diagonals_are_aligned_where_queries_and_keys_have_the_same_lengths() -> None:
    starts, others = (_empty(3, dtype=torch.int32) for _ in range(2))
    x = _empty(30000, 4, 128)

    def aligned(key: Tensor = x, **options: Any) -> bool:
        with record("sm_90") as wanted:
            varlen_attention(x, key, key, starts, is_causal=True, backend="hopper", **options)
        [spec] = wanted.specs
        return bool(spec.constants["FIRST_BLOCK"] == "diagonal")

    assert aligned() and aligned(cu_seqlens_q_padded=others, cu_seqlens_k_padded=others)
    assert not aligned(_empty(30100, 4, 128))  # where lengths beyond the queries' room would differ
    assert not aligned(cu_seqlens_k=others) and not aligned(seqused_q=_empty(2, dtype=torch.int32))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"causal_align": "top_left"},
        {"window_size": (100, 0), "is_causal": False},
        {"window_size": (100, 7), "is_causal": False},
        {"softcap": 30.0},
        {"alibi_slopes": torch.empty(4, device=META)},
        {"sinks": torch.empty(4, device=META)},
        {"seqused_k": torch.empty(BATCH, dtype=torch.int32, device=META)},
        {"seqused_q": torch.empty(BATCH, dtype=torch.int32, device=META)},
        {"layout": "sbhd"},
    ],
    ids=lambda options: "-".join(options),
)
@compiled
def test_what_it_takes_it_computes_itself(options: dict[str, Any]) -> None:
    [spec] = _forward(128, 128, 256, **options)
    assert spec.kernel.name == "_hopper_attention_fwd_kernel"


@compiled
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_strides_may_need_64_bits(packed: bool) -> None:
    q = _empty(2, 131136, 128, 128)
    assert q.stride(0) > 2**31
    with record("sm_90") as wanted:
        if packed:
            rows = q.view(-1, 128, 128).as_strided((8, 128, 128), (2**31 + 64, 128, 1))
            varlen_attention(rows, rows, rows, _empty(3, dtype=torch.int32), is_causal=True, backend="hopper")
        else:
            attention(q, q, q, is_causal=True, backend="hopper")
    [spec] = wanted.specs
    # of the inputs they are in the tensor maps; the packed result is contiguous
    assert spec.signature["stride_os"] == ("i32" if packed else "i64")
    assert entry_for(spec)[0].manifest["launch"]["stack"] <= 128


@compiled
def test_what_a_problem_does_not_say_goes_to_triton() -> None:
    q, k, v = (_empty(1, 256, 4, 64).expand(2, -1, -1, -1) for _ in range(3))
    with record("sm_90") as wanted:
        attention(q, k, v, backend="hopper")
    assert _names(wanted.specs) == {"_attention_fwd_kernel"}


def _names(specs: list[Spec]) -> set[str]:
    return {spec.kernel.name for spec in specs}


@compiled
def test_expanded_heads_are_read_once() -> None:
    q, k = _empty(2, 256, 4, 64), _empty(2, 256, 1, 64).expand(-1, -1, 4, -1)
    with record("sm_90") as wanted:
        attention(q, k, k, backend="hopper")
    assert _names(wanted.specs) == {"_hopper_attention_fwd_kernel"}


@compiled
@pytest.mark.parametrize("cudnn", [0, versions.USUAL_CUDNN])
def test_backward_is_hoppers_cudnns_or_tritons(cudnn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: cuDNN differentiates long 192/128 where it is there."""
    # not `assume`, which autograd's threads do not see; decisions are made once for a process's software
    monkeypatch.setattr(versions, "_here", lambda: versions.Installed((2, 11), True, cudnn))
    monkeypatch.setattr(select, "_decisions", {})

    def launched(dims: tuple[int, int], length: int) -> set[str]:
        sizes = (dims[0], dims[0], dims[1])
        inputs = (torch.empty(2, length, 4, d, dtype=torch.bfloat16, device=META, requires_grad=True) for d in sizes)
        with any_order(), record("sm_90") as wanted:
            out = attention(*inputs, is_causal=True)
            out.backward(torch.empty_like(out))
        return _names(wanted.specs)

    assert "_hopper_attention_bwd_kernel" in launched((128, 128), 2048)
    names = launched((192, 128), 8192)
    assert "_hopper_attention_fwd_kernel" in names
    assert ("_hopper_attention_bwd_d192_kernel" in names) == (cudnn == 0)
    assert "_hopper_attention_bwd_d192_kernel" in launched((192, 128), 512)


def test_heads_of_a_group() -> None:
    mib = 2**20
    found = [plans.group_for(n * mib, 1, True) for n in (1, 2, 4, 8, 64)]
    assert found == [8, 8, 4, 4, 4]
    assert plans.group_for(4 * mib, 4, True) == 8
    assert plans.group_for(4 * mib, 1, False) == 1 and plans.group_for(4 * mib, 4, False) == 4


def test_a_failed_self_test_leaves_it_to_triton(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each plan by itself."""
    if settings().interpret:
        pytest.skip("another reason comes first")
    wrong, right = plans.plan_for(64, 64, 512), plans.plan_for(128, 128, 512)
    reason = "its self-test gave 7 wrong results of 9"
    monkeypatch.setattr(hopper_backend, "_self_tests", {})
    monkeypatch.setattr(hopper_backend, "forward_defect", lambda call, plan, _: reason if plan == wrong else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call: Any = SimpleNamespace(q=SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda", 0))))
    for _ in range(2):
        assert hopper_backend.fails_here(call, wrong) == reason
        assert hopper_backend.fails_here(call, right) is None
    said = capfd.readouterr().err
    assert said.count("at head dims 64 and 64: triton serves cuda:0 although the Hopper kernel is for it") == 1


def test_what_is_kept_is_allocated_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's warm-up for CUDA graphs counts what a thread allocates, and raises if any of it stays."""
    threads: list[int] = []
    waits: list[str] = []
    zeros = torch.zeros
    stream = SimpleNamespace(wait_stream=waits.append)

    def allocate(*args: Any, **options: Any) -> Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default stream of {device}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(tile_counter, "_counters", {})
    x: Any = SimpleNamespace(is_meta=False, device=torch.device("cpu"), get_device=lambda: 0)
    first, second = tile_counter.counter_of(x), tile_counter.counter_of(x)
    assert first is second and first.dtype is torch.int32 and first.tolist() == [0]
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert waits == ["the default stream of cpu"]


@compiled
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128)])
def test_backward_looks_at_saved_tensors_once(head_dims: tuple[int, int]) -> None:
    """A checkpoint hands each out but once."""
    d_qk, d_v = head_dims
    unpacked: list[int] = []
    with record("sm_90"), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(id(x)) or x):
        q, k, v = (
            torch.empty(1, 256, 2, d, dtype=torch.bfloat16, device=META, requires_grad=True) for d in (d_qk, d_qk, d_v)
        )
        out = attention(q, k, v, is_causal=True, backend="hopper")
        torch.autograd.grad(out, [q, k, v], torch.empty_like(out))
    assert len(unpacked) == 5  # query, key, value, out, LSE


@compiled
@pytest.mark.parametrize(
    "shape, causal, consumers",
    # B, S, H: 16k tokens; few tiles, where three consumers leave SMs idle; causal ones by their length alone
    [((5, 3000, 16), False, 3), ((16, 1024, 16), False, 2), ((1, 4200, 8), False, 2), ((1, 4200, 8), True, 3)],
    ids=str,
)
def test_consumers_of_head_dim_64(shape: tuple[int, int, int], causal: bool, consumers: int) -> None:
    q = _empty(*shape, 64)
    with record("sm_90") as wanted:
        attention(q, q, q, is_causal=causal, backend="hopper")
    [spec] = wanted.specs
    assert spec.constants["CONSUMERS"] == consumers
