"""Which rows of a tile leave the Hopper forward: its own device functions, step by step on the host. A tile's rows are
(query, head) pairs of as many heads as share it, and those behind the last whole query hold anything."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention.decode_tiles import size_of_part
from powertrain.ops.attention.hopper import forward_store, forward_tiles, plans, softmax
from powertrain.ops.shapes import cdiv, next_power_of_2
from tests.torch_setup import INTERPRET

ROWS = 64  # of a consumer

pytestmark = pytest.mark.skipif(INTERPRET, reason="launches nothing: the same as in the run on the CPU")
# random problems; these have all consumers with all head dims, packed and not, and heads of a tile of every kind: one,
# numbers that divide its rows, 32 and odd ones
_SOME = {0, 1, 3, 4, 6, 7, 9, 19, 23, 25, 29, 31, 32, 33, 37, 41, 50, 56}
SEEDS = [pytest.param(seed, marks=() if seed in _SOME else pytest.mark.slow) for seed in range(60)]


class _Registers(Tensor):
    """A tensor of the device functions, which has a layout."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def _registers(x: Tensor) -> Any:
    return x.as_subclass(_Registers)


class _Memory:
    """Elements of global memory, and how often each was stored."""

    def __init__(self, *shape: int) -> None:
        self.values, self.stores = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.int32)

    def store(self, at: Tensor, values: Tensor, mask: Tensor) -> None:
        at, values, mask = torch.broadcast_tensors(at, values, mask)
        at = at[mask].as_subclass(Tensor)
        assert not len(at) or (0 <= at.min() and at.max() < self.values.numel())
        self.values.view(-1)[at] = values[mask].as_subclass(Tensor)
        self.stores.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))


class _Pointer(NamedTuple):
    memory: _Memory
    offset: Any = 0

    dtype = SimpleNamespace(element_ty=torch.float32)

    def __add__(self, other: Any) -> "_Pointer":  # type: ignore[override]
        return _Pointer(self.memory, self.offset + other)


def _store(place: _Pointer, values: Tensor, mask: Tensor) -> None:
    place.memory.store(place.offset, values, mask)


def _multiple_of(place: _Pointer, sizes: list[int]) -> _Pointer:
    assert bool((place.offset[..., ::8] % 8 == 0).all())  # what the compiler is promised: 16 bytes
    return place


class _Shared:
    """[rows, columns] in shared memory."""

    def __init__(self, *shape: int) -> None:
        self.content, self.shape, self.dtype = torch.full(shape, torch.nan), shape, torch.float32

    def index(self, i: int) -> "_Shared":
        part = _Shared(*self.shape[1:])
        part.content = self.content[int(i)]
        return part

    def store(self, x: Tensor) -> None:
        self.content.copy_(x)

    def load(self, layout: None) -> Tensor:
        return self.content


def _panels(smem: _Shared, dtype: torch.dtype, shape: list[int], layout: None) -> _Shared:
    rows, columns = smem.shape
    result = _Shared(*shape)
    result.content = smem.content.view(rows, columns // shape[2], shape[2]).transpose(0, 1).reshape(shape)
    return result


class _Map(NamedTuple):
    """The tensor map of results [storage, heads, queries, head dim], or [storage, queries, heads, head dim] of heads
    that share tiles, in their memory [storage, queries, heads, head dim]."""

    memory: _Memory
    pack: int

    def store(self, where: list[Any], smem: _Shared) -> None:
        storage, first, head, column = (int(n) for n in where)
        if self.pack == 1:
            first, head = head, first
        queries = ROWS // self.pack
        columns = smem.shape[-1]
        box = smem.content[: queries * self.pack].view(queries, self.pack, columns)
        _, all_queries, heads, head_dim = self.memory.values.shape
        index = torch.arange(self.memory.values.numel()).view(self.memory.values.shape)[storage]
        inside = index[first : first + queries, head : head + self.pack, column : column + columns]
        assert first < all_queries or not inside.numel()
        assert head + self.pack <= heads and column < head_dim
        self.memory.store(
            inside, box[: inside.shape[0], :, : inside.shape[2]], torch.ones_like(inside, dtype=torch.bool)
        )


def _nothing(*_: Any) -> None:
    pass


GL = SimpleNamespace(
    num_warps=lambda: 4,
    arange=lambda first, end, layout: _registers(torch.arange(first, end)),
    expand_dims=lambda x, dim: x.unsqueeze(dim),
    minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    where=torch.where, to_tensor=torch.tensor, store=_store, static_range=range, int64=torch.int64,
    SliceLayout=lambda dim, layout: None, BlockedLayout=lambda *_: None, convert_layout=lambda x, layout: x,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, dtype: None),
    max_contiguous=lambda x, sizes: x, multiple_of=_multiple_of, max_constancy=lambda x, sizes: x,
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions under test, and those that they call, are Python with torch as their language."""
    barriers = SimpleNamespace(fence_async_shared=_nothing, store_wait=_nothing)
    given = {
        "gl": GL, "barrier": _nothing, "hopper": barriers, "tma": barriers, "reinterpret": _panels,
        "tma_store": lambda to, where, smem: to.store(where, smem), "as_tile": lambda smem, pack=1: smem,
        "parts_of": lambda o, parts: o.chunk(parts, 1),
    }  # fmt: skip
    for module in (forward_tiles, softmax, forward_store):
        for name, value in list(vars(module).items()):
            if name in given:
                monkeypatch.setattr(module, name, given[name])
            elif callable(getattr(value, "fn", None)):
                monkeypatch.setattr(module, name, value.fn)
    yield


class _Launch(NamedTuple):
    """Sequences behind one another in a tensor, or of `storage` entries, whose heads share tiles by `pack`."""

    spans: list[tuple[int, int, int, int]]  # entry, first row, capacity, length
    storage: int
    queries: int  # rows of an entry
    is_packed: bool
    kv: int
    per_kv: int
    pack: int
    consumers: int
    dim: int
    store_parts: int

    @staticmethod
    def random(seed: int, whole: bool, is_packed: bool | None = None) -> "_Launch":
        draws = random.Random(seed)
        pack, kv, consumers = draws.randint(1, 32), draws.randint(1, 2), draws.choice([2, 3])
        per_kv = pack * draws.randint(1, 2) if whole else draws.randint(1, 40)
        is_packed = draws.random() < 0.5 if is_packed is None else is_packed
        counts = [
            draws.choice([0, 1, draws.randint(0, 90), 64 // pack * consumers]) for _ in range(draws.randint(1, 3))
        ]
        spans, row = [], 0
        if is_packed:
            # rows before the first sequence, and behind the last, have no length
            for n, count in enumerate([draws.choice([0, 5]), *counts, draws.choice([0, 70])]):
                is_sequence = 0 < n <= len(counts)
                spans.append((0, row, count, draws.choice([count, count // 2]) if is_sequence else 0))
                row += count
            storage = 1
        else:
            storage, row = len(counts), max(1, counts[0])
            spans = [(n, 0, row, row) for n in range(storage)]
        dim, store_parts = draws.choice([(64, 1), (128, 1), (128, 2), (72, 1)])
        return _Launch(spans, storage, row, is_packed, kv, per_kv, pack, consumers, dim, store_parts)

    @property
    def heads(self) -> int:
        return self.kv * self.per_kv

    @property
    def width(self) -> int:
        """Columns of results in registers."""
        return next_power_of_2(self.dim)

    def memory(self) -> tuple[_Memory, _Memory]:
        return _Memory(self.storage, self.queries, self.heads, self.dim), _Memory(
            self.storage, self.heads, self.queries
        )

    def tiles(self) -> Iterator["_Tile"]:
        each = plans.Plan((64,), (64,), consumers=self.consumers, heads_per_tile=self.pack).queries
        of_kv = cdiv(self.per_kv, self.pack)
        at = 0
        for entry, start, capacity, length in self.spans:
            for first in range(0, capacity, each):
                for group in range(self.kv * of_kv):
                    head = group // of_kv * self.per_kv + group % of_kv * self.pack
                    for consumer in range(self.consumers):
                        yield _Tile(self, at, entry, start, capacity, length, first, head, consumer)
                    at += 1

    def expected(self) -> tuple[Tensor, Tensor]:
        """0 and -inf in rows that are not in use."""
        used = torch.zeros(self.storage, self.queries, 1, dtype=torch.bool)
        for entry, start, _, length in self.spans:
            used[entry, start : start + length] = True
        shape = self.storage, self.queries, self.heads
        number = torch.arange(self.storage * self.queries * self.heads).view(shape).float()
        o = torch.where(used, number, 0.0)[..., None].expand(*shape, self.dim)
        return o, torch.where(used, number, -torch.inf).transpose(1, 2)


class _Tile(NamedTuple):
    """A consumer's part of a tile."""

    launch: _Launch
    at: int  # of all tiles
    entry: int
    start: int
    capacity: int
    length: int
    first: int
    head: int
    consumer: int

    @property
    def config(self) -> Any:
        launch = self.launch
        return SimpleNamespace(
            ragged=True, packed=launch.is_packed, heads_per_tile=launch.pack, d_v=launch.dim, consumers=launch.consumers
        )

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(first query, queries, heads behind the tile's, results) of the rows as the consumer has them: the number of
        each, NaN behind the last whole query."""
        launch, local = self.launch, torch.arange(ROWS)
        row = torch.tensor(self.first + self.consumer * (ROWS // launch.pack))
        lane = forward_tiles.with_head_of(0, local, launch.pack) + torch.zeros_like(local)
        i = row + forward_tiles.query_of(local, launch.pack)
        result = (((self.entry * launch.queries + self.start + i) * launch.heads) + self.head + lane).float()
        result[ROWS // launch.pack * launch.pack :] = torch.nan
        return row, i, lane, result

    def mask(self, members: int | None) -> Tensor:
        row, i, lane, _ = self.vectors()
        head, capacity = torch.tensor(self.head), torch.tensor(self.capacity)
        return forward_store._is_row(i, row, lane, head, capacity, members, self.launch.pack)

    def store(self, o: _Memory, lse: _Memory, members: int | None, has_map: bool) -> None:
        """Results as of a whole tile."""
        launch = self.launch
        row, i, lane, result = self.vectors()
        of_lse = (self.entry * launch.heads + self.head + lane) * launch.queries + self.start + i
        lse.store(of_lse, torch.where(i < self.length, result, -torch.inf), self.mask(members))
        of_row, of_head = (torch.tensor(n) for n in (launch.heads * launch.dim, launch.dim))
        strides = SimpleNamespace(ob=launch.queries * of_row, os=of_row, oh=of_head)
        forward_store._store_whole(
            (_registers(torch.ones(ROWS, launch.width)),), _registers(result), _registers(i),
            (_Map(o, launch.pack),) if has_map else None,
            (_Shared(launch.consumers, ROWS, launch.width // launch.store_parts),), _Pointer(o),
            torch.tensor(self.entry), torch.tensor(self.head), row, torch.tensor(self.start), self.length,
            torch.tensor(self.capacity), members, strides,
            launch.store_parts, self.config, self.consumer,
        )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_of_whole_tiles_is_stored_once(seed: int) -> None:
    """By tensor maps, and at the end of packed sequences by ordinary stores."""
    launch = _Launch.random(seed, whole=True)
    o, lse = launch.memory()
    for tile in launch.tiles():
        tile.store(o, lse, None, has_map=True)
    _check(launch, o, lse)


@pytest.mark.parametrize("seed", SEEDS)
def test_heads_that_a_tile_lacks_are_another_ones(seed: int) -> None:
    """By ordinary stores: of a list's whole tiles, and of splits."""
    launch = _Launch.random(seed, whole=False)
    o, lse = launch.memory()
    for tile in launch.tiles():
        tile.store(o, lse, launch.per_kv, has_map=False)
    _check(launch, o, lse)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_a_list_leave_all_their_rows(seed: int) -> None:
    """What the combination reads of a part: its rows by whole queries, consumer behind consumer."""
    launch = _Launch.random(seed, whole=False, is_packed=True)
    pack, dim = launch.pack, launch.dim
    queries = ROWS // pack
    rows = queries * pack * launch.consumers
    tiles = list(launch.tiles())
    slots = max((tile.at for tile in tiles), default=-1) + 1
    partial = _Memory(max(1, slots), size_of_part(rows, dim))
    expected = torch.zeros(max(1, slots), rows)
    for tile in tiles:
        row, _, _, result = tile.vectors()
        config, slot, head = tile.config, torch.tensor(tile.at), torch.tensor(tile.head)
        of_part = forward_store._place_of_part(_Pointer(partial), slot, rows, config)
        of_part += tile.consumer * queries * pack
        _store(of_part + torch.arange(ROWS), result, tile.mask(launch.per_kv))
        count = forward_tiles.queries_left(torch.tensor(tile.capacity) - row, ROWS, pack)
        forward_store._store_listed_part(
            (_registers(torch.ones(ROWS, launch.width)),), _registers(result), _Pointer(partial), slot, head, count,
            launch.per_kv, config, tile.consumer,
        )  # fmt: skip
        for n in range(queries * pack):
            query, lane = int(row) + n // pack, n % pack
            if query < tile.capacity and tile.head % launch.per_kv + lane < launch.per_kv:
                expected[tile.at, tile.consumer * queries * pack + n] = 1
    begin = partial.values.shape[1] - rows * dim
    assert begin % 4 == 0 and not partial.stores[:, rows:begin].any()
    assert partial.stores[:, :rows].equal(expected.int())
    assert partial.stores[:, begin:].view(-1, rows, dim).equal(expected.int()[..., None].expand(-1, -1, dim))
    assert not partial.values[partial.stores > 0].isnan().any()
    lse, o = partial.values[:, :rows], partial.values[:, begin:].view(-1, rows, dim)
    assert (o[expected > 0] == lse[expected > 0][:, None]).all()


def _check(launch: _Launch, o: _Memory, lse: _Memory) -> None:
    assert o.stores.eq(1).all() and lse.stores.eq(1).all()
    expected, expected_lse = launch.expected()
    torch.testing.assert_close(o.values, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse.values, expected_lse, rtol=0, atol=0)
