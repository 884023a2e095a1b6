"""The Hopper backward above head dim 256 without a GPU: chunks, tiles and addresses as Python; its machine code."""

import inspect
import random
import re
import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention.hopper import (
    backward_d512_products,
    backward_d512_scores,
    backward_d512_tiles,
    backward_tiles,
)
from powertrain.ops.attention.hopper.backward import launch_backward, why_not_of
from powertrain.ops.attention.hopper.backward_d512 import (
    MEMORY,
    chunks_of,
    key_tiles_seen,
    panel_width,
    width_of_products,
)
from powertrain.ops.attention.hopper.backward_plans import plan_of
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operands
from powertrain.ops.attention.triton import sequences
from powertrain.ops.shapes import cdiv
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.recording import record
from tests.ops.attention.machine_code import instructions
from tests.torch_setup import INTERPRET

META = torch.device("meta")
TILE = 128

pytestmark = pytest.mark.skipif(INTERPRET, reason="launches nothing: the same as in the run on the CPU")


class _Pointer:
    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, step: int) -> "_Pointer":
        return _Pointer(self.values, self.at + step)


def _load(pointer: _Pointer, mask: bool = True, other: int = 0) -> int:
    return pointer.values[pointer.at] if mask else other


_GL = SimpleNamespace(
    maximum=max, minimum=min, cdiv=cdiv, to_tensor=lambda x: x, load=_load, where=lambda c, a, b: a if c else b,
    constexpr=int, program_id=lambda axis: 0, num_programs=lambda axis: 1, static_range=range,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype: None),
)  # fmt: skip


class _Smem(SimpleNamespace):
    """Pipeline stages: their shape alone."""

    dtype = SimpleNamespace(primitive_bitwidth=16)

    def index(self, stage: int) -> "_Smem":
        return _Smem(shape=self.shape[1:])


class _Desc(NamedTuple):
    """A map of a whole tensor in tiles; of those that may end anywhere (maps.py's `ending_maps`)."""

    dims: tuple[int, ...]
    block: tuple[int, ...]
    is_ragged: bool = False


def _rows_desc(storage: int, heads: int, rows: int, columns: int, block: tuple[int, int], is_ragged: bool) -> _Desc:
    return _Desc((storage, heads, rows + 1 if is_ragged else 1, rows, columns), (1, 1, 1, *block), is_ragged)


def _tma_load(desc: _Desc, place: list[int], bar: Any, smem: _Smem) -> None:
    """TMA moves 64 columns at a time. What lies outside wholly makes it read where the descriptor's tensor begins: of a
    ragged one that is ahead of the tensor."""
    assert smem.shape == desc.block[-2:]
    *front, column = place
    assert all(0 <= at < size for at, size in zip(front, desc.dims, strict=False))
    if len(desc.dims) == 2:
        assert 0 <= column < desc.dims[1]
    elif desc.is_ragged:
        assert all(column + part < desc.dims[-1] for part in range(0, desc.block[-1], 64))
        end, row = front[-2:]
        assert end + row >= desc.dims[-2]  # no row ahead of the tensor


def _as_python() -> dict[str, Any]:
    """The device functions that reckon tiles, on plain integers."""
    names: dict[str, Any] = {"gl": _GL, "tl": _GL, "TILE": TILE, "GROUP": 4, "Work": backward_d512_products.Work}
    names |= {"Tile": backward_d512_tiles.Tile, "Chunk": backward_d512_tiles.Chunk}
    names |= {
        "await_kernel_before": lambda early: None, "tma_load": _tma_load, "kept": int, "as_tile": lambda smem: smem,
        "reinterpret": lambda smem, dtype, shape, layout: _Smem(shape=tuple(shape)),
        "mbarrier": SimpleNamespace(wait=lambda bar, phase: None, expect=lambda bar, size: None),
    }  # fmt: skip
    for module, functions in (
        (sequences, ("find_sequence", "sequence_span")),
        (backward_tiles, ("place_of",)),
        (backward_d512_tiles, ("tile_at", "first_seen", "keys_seen", "queries_that_see", "grouped", "own_item")),
        (backward_d512_scores, ("_item", "_load_pair", "_load")),
        (backward_d512_products, ("_work_of_keys", "_work_of_queries", "_take_stage", "_panels", "_load_rows")),
        (backward_d512_products, ("_load_of_keys", "_load_of_queries")),
    ):
        for name in functions:
            source = inspect.getsource(getattr(module, name).fn)
            source = (
                re.sub(r"^@.*\n", "", source, flags=re.M).replace(": gl.constexpr", "").replace(": tl.constexpr", "")
            )
            exec(source, names)
    return names


FUNCTIONS = _as_python()


class _Problem(SimpleNamespace):
    """Lengths, a mask, and a budget for weights, by a seed."""

    @staticmethod
    def of(seed: int) -> "_Problem":
        draw = random.Random(seed)
        packed, batch, kv, repeats = draw.random() < 0.5, draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 3)
        q_lens = [draw.choice((0, 1, 60, 128, 200, 300, 513)) for _ in range(batch)]
        k_lens = [draw.choice((0, 1, 64, 130, 256, 400, 600)) for _ in range(batch)]
        left, right = draw.choice(((-1, -1), (-1, 0), (-1, 0), (100, 0), (150, 70), (-1, 30), (40, -1)))
        used = draw.random() < 0.4
        if packed:
            gap = draw.choice((0, 0, 50))
            q_starts, k_starts = [gap], [gap]
            for q_len, k_len in zip(q_lens, k_lens, strict=True):
                q_starts.append(q_starts[-1] + q_len)
                k_starts.append(k_starts[-1] + k_len)
            queries, keys = q_starts[-1] + gap + 1, k_starts[-1] + gap + 1
        else:
            queries, keys = max(1, *q_lens), max(1, *k_lens)
            q_starts = k_starts = None
        if used:
            q_used, k_used = ([draw.randint(0, x) for x in lens] for lens in (q_lens, k_lens))
        else:
            q_used = k_used = None
            if not packed:
                q_lens, k_lens = [queries] * batch, [keys] * batch
        config = backward_d512_tiles.Config(
            left >= 0, right >= 0, draw.random() < 0.7, False, packed, packed or used, packed or used, 512, False
        )
        sizes = backward_d512_tiles.Sizes(batch, queries, keys, kv, repeats, left, right)
        lengths = SimpleNamespace(
            q_starts=q_starts and _Pointer(q_starts), k_starts=k_starts and _Pointer(k_starts),
            q_used=q_used and _Pointer(q_used), k_used=k_used and _Pointer(k_used),
        )  # fmt: skip
        memory = draw.choice((1, 2, 5, 40, 1000)) * TILE * 128 * 4
        return _Problem(
            packed=packed, config=config, sizes=sizes, lengths=lengths, memory=memory, parts=draw.randint(1, 4),
            q_lens=q_used or q_lens, k_lens=k_used or k_lens, q_starts=q_starts, k_starts=k_starts,
        )  # fmt: skip

    def slots(self, rows: int) -> int:
        return cdiv(rows, TILE) + (self.sizes.batch + 1 if self.packed else 0)

    def visible(self) -> set[tuple[int, int, int, int]]:
        """(batch entry, head, tile of queries, tile of keys) of all pairs that a mask lets see, by their definition."""
        found = set()
        left, right = self.sizes.left, self.sizes.right
        for b, (q_len, k_len) in enumerate(zip(self.q_lens, self.k_lens, strict=True)):
            offset = k_len - q_len if self.config.bottom_right else 0
            for i in range(q_len):
                low = max(0, i + offset - left) if left >= 0 else 0
                high = min(k_len, i + offset + right + 1) if right >= 0 else k_len
                tiles = range(low // TILE, cdiv(high, TILE)) if low < high else ()
                found |= {(b, i // TILE, n) for n in tiles}
        heads = self.sizes.kv_heads * self.sizes.num_q_per_kv
        return {(b, head, i, n) for b, i, n in found for head in range(heads)}


@pytest.mark.parametrize("seed", range(200))
def test_every_weight_is_written_before_it_is_read(seed: int) -> None:
    problem = _Problem.of(seed)
    sizes, config, lengths = problem.sizes, problem.config, problem.lengths
    storage = 1 if problem.packed else sizes.batch
    slots, key_slots = problem.slots(sizes.queries), problem.slots(sizes.keys)
    columns = key_tiles_seen(sizes.keys, sizes.left, sizes.right) * TILE
    sums: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # what each tile of dk has added up
    of_queries: dict[tuple[int, ...], list[int]] = {}
    written_rows, written_keys = set(), set()
    for chunk in chunks_of(storage * sizes.kv_heads, sizes.num_q_per_kv, slots, 4 * TILE * columns, problem.memory):
        at = backward_d512_tiles.Chunk(*chunk[:4])
        weights = {}
        for index in range(chunk.units * chunk.slots * problem.parts):
            part, tile, row, begin, end, _, _, k_len = FUNCTIONS["_item"](
                index, problem.parts, lengths, sizes, at, config
            )
            assert 0 <= row < chunk.units * chunk.slots * TILE
            for n in range(begin + part, end, problem.parts):
                assert tile.first < tile.length
                assert n * TILE < k_len
                assert 0 <= (n - begin) * TILE < columns
                assert (row, n - begin) not in weights
                weights[row, n - begin] = (tile.b, tile.head, tile.first // TILE, n)
        groups = cdiv(chunk.units, sizes.num_q_per_kv)
        for index in range(groups * key_slots * 2):
            work, _, q_len, offset = FUNCTIONS["_work_of_keys"](index, 1, key_slots, lengths, sizes, at, 2, config)
            tile, key = work.tile, (index, chunk.unit // sizes.num_q_per_kv)
            if chunk.is_first:
                sums[key] = []
            for repeat in range(work.repeats):
                for step in range(work.steps):
                    first = work.begin * TILE + step * 64
                    assert first < q_len
                    left = FUNCTIONS["first_seen"](first // TILE * TILE, offset, sizes.left, config.has_left)
                    row = work.w_row + repeat * chunk.slots * TILE + first
                    found = weights[row // TILE * TILE, tile.first // TILE - left]
                    head = tile.head * sizes.num_q_per_kv + work.repeat + repeat
                    assert found == (tile.b, head, first // TILE, tile.first // TILE)
                    sums[key].append((*found, first // 64, work.column))
            if chunk.is_last and tile.first < tile.capacity:
                written_keys.add((tile.b, tile.head, tile.first, work.column))
        for index in range(chunk.units * chunk.slots * 2):
            work, _, k_len, _ = FUNCTIONS["_work_of_queries"](index, lengths, sizes, at, 2, config)
            tile = work.tile
            for step in range(work.steps):
                found = weights[work.w_row, step // 2]
                n = work.begin + step // 2
                assert found == (tile.b, tile.head, tile.first // TILE, n)
                assert work.begin * TILE + step * 64 < k_len
                of_queries.setdefault((*found, work.column), []).append(step)
            if tile.first < tile.capacity:
                assert (tile.b, tile.head, tile.first, work.column) not in written_rows
                written_rows.add((tile.b, tile.head, tile.first, work.column))
    added = [each for parts in sums.values() for each in parts]
    assert len(added) == len(set(added))
    visible = problem.visible()
    for column in range(2):
        assert {each[:4] for each in added if each[-1] == column} >= visible
        assert {key[:4] for key in of_queries if key[-1] == column} >= visible
    # both halves of a tile, unless a sequence ends before
    for b, head, i, n in visible:
        halves = {each[4] for each in added if each[:4] == (b, head, i, n)}
        assert halves == {2 * i} | ({2 * i + 1} if (2 * i + 1) * 64 < problem.q_lens[b] else set())
        count = 1 + ((2 * n + 1) * 64 < problem.k_lens[b])
        assert len(of_queries[b, head, i, n, 0]) == count
    _covers(problem, written_rows, sizes.queries, problem.q_starts, sizes.kv_heads * sizes.num_q_per_kv)
    _covers(problem, written_keys, sizes.keys, problem.k_starts, sizes.kv_heads)


@pytest.mark.parametrize("head_dim", [200, 264, 320, 384, 448, 512])
@pytest.mark.parametrize("seed", range(25))
def test_no_load_lies_wholly_outside(seed: int, head_dim: int) -> None:
    problem = _Problem.of(seed)
    sizes, lengths, config = problem.sizes, problem.lengths, problem.config._replace(d=head_dim)
    storage = 1 if problem.packed else sizes.batch
    slots, key_slots = problem.slots(sizes.queries), problem.slots(sizes.keys)
    columns = key_tiles_seen(sizes.keys, sizes.left, sizes.right) * TILE
    width = width_of_products(head_dim)
    tiles, count = _Smem(shape=(5, TILE, 64)), cdiv(head_dim, width)
    bars = _Smem(shape=(5,)), _Smem(shape=(5,))
    smem = _Smem(shape=(4, 64, TILE)), _Smem(shape=(4, 64, width))
    of_queries = storage, sizes.kv_heads * sizes.num_q_per_kv, sizes.queries, head_dim
    of_keys = storage, sizes.kv_heads, sizes.keys, head_dim
    q, k = (
        [
            _rows_desc(*dims, block, ragged)
            for block in ((TILE, 64), (64, panel_width(head_dim, width, ragged)))
        ]
        for dims, ragged in ((of_queries, config.ragged_q), (of_keys, config.ragged_k))
    )  # fmt: skip
    for chunk in chunks_of(storage * sizes.kv_heads, sizes.num_q_per_kv, slots, 4 * TILE * columns, problem.memory):
        at = backward_d512_tiles.Chunk(*chunk[:4])
        items = chunk.units * chunk.slots
        weights = 2 * items * TILE, columns
        FUNCTIONS["_load"](
            (q[0], k[0], k[0], q[0]), lengths, (tiles, tiles), bars, sizes, at, items * problem.parts, problem.parts,
            config,
        )  # fmt: skip
        FUNCTIONS["_load_of_keys"](
            q[1], q[1], _Desc(weights, (64, TILE)), lengths, smem, bars, sizes, at,
            cdiv(chunk.units, sizes.num_q_per_kv) * key_slots * 2 * count, 2, key_slots, 0, count, config,
        )  # fmt: skip
        FUNCTIONS["_load_of_queries"](
            k[1], _Desc(weights, (TILE, 64)), lengths, (_Smem(shape=(4, TILE, 64)), smem[1]), bars, sizes, at,
            items * count, count, config,
        )  # fmt: skip


def _covers(problem: _Problem, written: set[Any], rows: int, starts: list[int] | None, heads: int) -> None:
    """Every row of memory is written: those of no sequence with zeros."""
    spans = [(b, rows) for b in range(problem.sizes.batch)]
    if starts is not None:
        last = len(starts) - 1
        spans = [(b, starts[b + 1] - starts[b]) for b in range(last)] + [
            (last, rows - starts[-1]),
            (last + 1, starts[0]),
        ]
    expected = {
        (b, head, first, column)
        for b, size in spans
        for first in range(0, size, TILE)
        for head in range(heads)
        for column in range(2)
    }
    assert written == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # groups, heads of each, tiles, bytes of a tile, memory: chunks of (heads, tiles), and how many sum up
        ((2, 4, 8, 10, 1000), [(8, 8, True, True)]),
        ((5, 1, 8, 10, 170), [(2, 8, True, True), (2, 8, True, True), (1, 8, True, True)]),
        ((2, 3, 8, 10, 170), [(2, 8, True, False), (1, 8, False, True)] * 2),
        ((1, 2, 8, 10, 50), [(1, 5, True, False), (1, 3, False, False), (1, 5, False, False), (1, 3, False, True)]),
        ((1, 1, 2, 10, 5), [(1, 1, True, False), (1, 1, False, True)]),  # one tile needs more than there is
    ],
)
def test_chunks(shape: tuple[int, ...], expected: list[tuple[Any, ...]]) -> None:
    found = [(c.units, c.slots, c.is_first, c.is_last) for c in chunks_of(*shape)]
    assert found == expected


def test_head_dims() -> None:
    assert all(why_not_of(dim, dim, False, True) is None for dim in (264, 320, 512))
    reason = "head dims must be equal multiples of 8, 200 to 512, are "
    for dims in ((512, 264), (260, 260), (520, 520)):
        assert why_not_of(*dims, False, True) == f"{reason}{dims[0]} and {dims[1]}"


@pytest.mark.parametrize(
    ("dims", "shape", "given", "stores"),
    [
        ((256, 256), (2, 8192, 8, 8), {}, True),
        ((256, 256), (8, 2048, 8, 8), {}, False),
        ((256, 256), (4, 1000, 16, 4), {}, True),  # sums over four heads
        ((256, 256), (4, 1000, 8, 8), {"deterministic": True}, True),
        ((256, 256), (2, 8192, 8, 8), {"left": 1024}, False),
        ((256, 256), (2, 8192, 8, 8), {"left": 1024, "right": -1}, True),
        ((256, 248), (2, 8192, 8, 8), {}, False),
        ((192, 192), (2, 8192, 8, 8), {}, False),
        ((512, 512), (1, 64, 8, 8), {}, True),
    ],
)
def test_which_calls_store_weights(
    dims: tuple[int, int], shape: tuple[int, ...], given: dict[str, Any], stores: bool
) -> None:
    batch, length, heads, kv_heads = shape
    args = OpArguments(*(None,) * 11, "bshd", 0.1, 0.0, 0.0, -1, 0, 0, True)._replace(**given)
    q, k, v = (_empty(batch, length, h, d) for h, d in ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1])))
    with record("sm_90"):
        assert plan_of(Operands.of(q, k, v, args)).stores_weights is stores


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


STARTS = _empty(3, dtype=torch.int32)
PACKED = {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS}
ALL = [True, True, True]


def _launches(head_dim: int, dtype: torch.dtype, need: list[bool], queries: int, **given: Any) -> list[Any]:
    args = OpArguments(*(None,) * 11, "bshd", 0.1, 0.0, 0.0, -1, 0, 0, True)._replace(**given)
    q, k = _empty(2, queries, 4, head_dim, dtype=dtype), _empty(2, queries, 2, head_dim, dtype=dtype)
    lse = _empty(2, 4, queries, dtype=torch.float32)
    if args.layout == "thd":
        q, k, lse = q.flatten(0, 1), k.flatten(0, 1), _empty(4, 2 * queries, dtype=torch.float32)
    with record("sm_90") as wanted:
        call = BackwardCall(q, None, q, k, k, q, lse, [*need, False], args)
        launch_backward(call, call.operands())
    return wanted.specs


def test_launches() -> None:
    """Once a chunk; without float32 sums where the heads that share keys are in one."""
    scores, products = "_hopper_attention_bwd_d512_scores_kernel", "_hopper_attention_bwd_d512_products_kernel"

    def names(need: list[bool], queries: int) -> list[str]:
        return [spec.kernel.name for spec in _launches(512, torch.bfloat16, need, queries)][1:]

    assert names(ALL, 512) == [scores, products, products]
    assert names([True, False, False], 512) == names([False, True, True], 512) == [scores, products]
    # 256 MiB a head, two heads that share keys: recordings keep each specialization once
    assert 2 * 4 * 8192**2 == MEMORY
    assert names(ALL, 8192) == names(ALL, 512)


def _slow(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "need", "given"),
    [
        pytest.param(512, torch.bfloat16, ALL, {}, id="d512"),
        pytest.param(256, torch.bfloat16, ALL, {"deterministic": True}, id="d256"),
        pytest.param(320, torch.bfloat16, ALL, PACKED, id="d320-packed"),
        _slow(512, torch.float16, ALL, {"right": -1}, id="full"),
        _slow(512, torch.bfloat16, ALL, {"left": 100, "softcap": 30.0}, id="window-softcap"),
        _slow(512, torch.bfloat16, ALL, {"slopes": _empty(4, dtype=torch.float32)}, id="alibi"),
        _slow(512, torch.bfloat16, ALL, {"queries": 16384}, id="sums"),
        _slow(384, torch.bfloat16, [False, True, False], {}, id="dk"),
    ],
)
def test_products_run_beside_everything_else(
    head_dim: int, dtype: torch.dtype, need: list[bool], given: dict[str, Any]
) -> None:
    """Where registers do not suffice, ptxas waits after every product: then there are as many waits as products."""
    chunks = cdiv(head_dim, 64)
    options = {"queries": 512} | given
    for spec in _launches(head_dim, dtype, need, **options)[1:]:
        entry = entry_for(spec)[0]
        facts = entry.manifest["launch"]
        assert facts["num_warps"] == 12
        assert facts["shared"] <= 232448
        assert facts["stack"] == 0
        ptx = zlib.decompress(entry.members["ptx"]).decode()
        code = instructions(entry.members["cubin"])
        assert "red.relaxed" not in ptx  # a fixed order
        if "scores" in spec.kernel.name:
            # of two consumers; each waits for a chunk when the next one is asked for, and at last for dp
            assert code["HGMMA"] == 2 * 2 * 4 * chunks
            assert code["WARPGROUP.DEPBAR"] == 2 * (2 * chunks - 1)
        else:
            assert code["HGMMA"] == 2 * 4
            assert code["WARPGROUP.DEPBAR"] <= 2 * 3
