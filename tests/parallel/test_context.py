"""Context parallelism without ranks: what goes where, which calls are made, what is chosen and what is refused."""

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.models.sequence_sharding import ContextSharding
from powertrain.nn.attention import Context
from powertrain.ops.attention import attention, varlen_attention
from powertrain.parallel.context.api import FLOPS_PER_BYTE, ContextParallel, choose_mode, context_parallel
from powertrain.parallel.context.block_attention import Mask, Queries, Sum, dense_blocks, gradients
from powertrain.parallel.context.sharding import Sharding

# long and odd, shorter than there are pieces, of one token, empty
DOCUMENTS = [37, 1, 0, 3, 20, 2, 8]


def shardings(lengths: list[int], world_size: int, *, is_packed: bool = True) -> list[Sharding]:
    return [Sharding(lengths, world_size, rank, is_packed=is_packed) for rank in range(world_size)]


@pytest.fixture
def cp(tmp_path: Path) -> Iterator[ContextParallel]:
    """Of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield context_parallel(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_differ_by_one_token(world_size: int, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, 5, draw.randrange(300), draw.randrange(5000)]) for _ in range(30)]
    ranks = shardings(lengths, world_size)
    counts = [sharding.length() for sharding in ranks]
    assert max(counts) - min(counts) <= 1
    assert all(sharding.length(rank) == n for sharding in ranks for rank, n in enumerate(counts))


@pytest.mark.parametrize("lengths", [DOCUMENTS, [1], [0], [], [4096], [101, 7]], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_make_the_whole(lengths: list[int], world_size: int) -> None:
    ranks = shardings(lengths, world_size)
    tokens = torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])
    parts = [sharding.shard(tokens, positions, dim=0) for sharding in ranks]
    order = ranks[0].order()
    assert torch.cat([part[0] for part in parts])[order].equal(tokens)
    for sharding, (own, own_positions) in zip(ranks, parts, strict=True):
        assert own.shape[0] == sharding.length()
        assert sharding.indices().equal(own)
        assert sharding.position_ids().equal(own_positions)


def test_zigzag() -> None:
    assert shardings([8], 2)[0].indices().tolist() == [0, 1, 6, 7]
    assert shardings([8], 2)[1].indices().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("lengths", "allowed"),
    [([65536], 1.0001), ([65537], 1.0001), ([30000, 20000, 11000, 4001, 519], 1.001), ([512] * 127 + [3], 1.005)],
    ids=["dense", "odd", "documents", "short"],
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_have_the_same_work(lengths: list[int], allowed: float, world_size: int) -> None:
    sharding = shardings(lengths, world_size)[0]
    pairs = [sharding.pairs(rank) for rank in range(world_size)]
    assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(pairs) < allowed * sum(pairs) / world_size


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (0, 0), (3, 9), (-1, 4), (30, -1), (1000, 1000)])
@pytest.mark.parametrize("length", [1, 6, 31, 64])
@pytest.mark.parametrize("slopes", [None, torch.ones(1)], ids=["", "alibi"])
def test_blocks_are_the_mask(window: tuple[int, int], length: int, slopes: Tensor | None) -> None:
    """Every pair that a mask lets see is in one block, every other in none."""
    left, right = window
    mask = Mask(left, right, 0.0, 1.0, slopes)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = torch.ones(length, length, dtype=torch.bool)
    sees &= (j >= i - left) if left >= 0 else True
    sees &= (j <= i + right) if right >= 0 else True
    found = torch.zeros(length, length, dtype=torch.int64)
    ranks = shardings([length], 3, is_packed=False)
    for sharding in ranks:
        for source in range(3):
            queries, keys = sharding.indices(), sharding.indices(rank=source)
            for block in dense_blocks(sharding, source, mask):
                q, k = queries[slice(*block.q)], keys[slice(*block.k)]
                m, n = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
                inside = torch.ones(len(q), len(k), dtype=torch.bool)
                inside &= (n >= m - block.left) if block.left >= 0 else True
                inside &= (n <= m + block.right) if block.right >= 0 else True
                found[q[:, None], k[None]] += inside
    assert found.equal(sees.long())


def test_blocks_are_few() -> None:
    causal, far = Mask(-1, 0, 0.0, 1.0, None), Mask(100, 0, 0.0, 1.0, None)
    for sharding in shardings([4096], 4, is_packed=False):
        calls = [dense_blocks(sharding, source, causal) for source in range(4)]
        assert [len(blocks) for blocks in calls] == [1, 1, 1, 1]
        assert all(b.right == (0 if source == sharding.rank else -1) for source, (b,) in enumerate(calls))
    first = shardings([4096], 4, is_packed=False)[0]
    assert [bool(dense_blocks(first, source, far)) for source in range(4)] == [True, True, False, False]


def of_emulated_ranks(ranks: list[Sharding], mask: Mask, made: list[Tensor], dim: int) -> list[Tensor]:
    """out, dq, dk, dv of all ranks, computed here one after another."""
    query, key, value, grad = ([sharding.shard(x, dim=dim)[0] for sharding in ranks] for x in made)
    outs, dqs = [], []
    dks, dvs = ([torch.zeros_like(x, dtype=torch.float32) for x in xs] for xs in (key, value))
    for rank, sharding in enumerate(ranks):
        queries = Queries(query[rank], sharding, mask)
        for source in range(len(ranks)):
            queries.attend(source, key[source], value[source])
        out, lse = queries.result(made[2].shape[-1], None)
        dq = Sum(torch.empty_like(query[rank], dtype=torch.float32), dim)
        for n in range(len(ranks)):
            shares = (torch.empty_like(dks[n]), torch.empty_like(dvs[n]))
            gradients(sharding, n, mask, grad[rank], query[rank], key[n], value[n], out, lse, dq, *shares)
            dks[n] += shares[0]
            dvs[n] += shares[1]
        outs.append(out)
        dqs.append(dq.result())
    order = ranks[0].order(made[0].device)
    return [torch.cat(x, dim).index_select(dim, order) for x in (outs, dqs, dks, dvs)]


@pytest.mark.kernels
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_kernels(packed: bool, device: torch.device) -> None:
    """Our kernels give rows of no document zeros, whatever piece of each is asked for."""
    lengths, dim = (DOCUMENTS, 0) if packed else ([sum(DOCUMENTS)], 1)
    shapes = [(sum(lengths), heads, 16) for heads in (2, 1, 1, 2)]
    made = [torch.randn(shape, device=device)[None] for shape in shapes]
    made = [x[0] for x in made] if packed else made
    ours = of_emulated_ranks(shardings(lengths, 2, is_packed=packed), Mask(-1, 0, 0.0, 0.25, None), made, dim)
    query, key, value = leaves = [x.double().requires_grad_() for x in made[:3]]
    options: dict[str, Any] = dict(is_causal=True, scale=0.25, backend="reference")
    if packed:
        out = varlen_attention(query, key, value, torch.tensor([0, *lengths], device=device).cumsum(0), **options)
    else:
        out = attention(query, key, value, **options)
    whole = [out, *torch.autograd.grad(out, leaves, made[3].double())]
    for x, y in zip(ours, whole, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_mode_by_bytes() -> None:
    choice = choose_mode(65536, 4, 32, 8, (128, 128))
    assert choice.mode == "all_gather"
    assert choice.bytes_received["ring"] == 3 * 16384 * 8 * 256 * (2 * 2 + 4)
    assert choice.bytes_received["all_to_all"] == 2 * 3 * 16384 * (32 + 8) * 256 * 2 // 4
    # keys and values of all ranks are 8 GiB
    assert choose_mode(1 << 20, 4, 32, 32, (128, 128)).mode == "ring"
    # as many tokens as hide the transfers, and one less
    enough = int(2 * FLOPS_PER_BYTE) + 1
    assert choose_mode(4 * enough, 4, 32, 32, (128, 128)).mode == "all_gather"
    assert choose_mode(4 * (enough - 1), 4, 32, 32, (128, 128)).mode == "all_to_all"
    assert choose_mode(64, 4, 32, 1, (128, 128)).mode == "all_gather"
    impossible: dict[Any, str] = {"all_to_all": "30 heads"}
    assert choose_mode(64, 4, 30, 30, (128, 128), impossible=impossible).mode == "all_gather"


def test_no_mode_names_every_reason() -> None:
    impossible: dict[Any, str] = {"ring": "chunks", "all_gather": "chunks", "all_to_all": "3 heads"}
    with pytest.raises(ValueError, match="ring: chunks; all_gather: chunks; all_to_all: 3 heads"):
        choose_mode(64, 4, 3, 3, (8, 8), impossible=impossible)


def make(cp: ContextParallel, tokens: int = 9) -> tuple[list[Tensor], Sharding]:
    return [torch.randn(2, tokens, heads, 8) for heads in (4, 2, 2)], cp.sharding(9)


def test_one_rank_is_plain_attention(cp: ContextParallel) -> None:
    (q, k, v), sharding = make(cp)
    torch.testing.assert_close(cp.attention(q, k, v, sharding, is_causal=True), attention(q, k, v, is_causal=True))
    assert cp.unshard(sharding.shard(q)[0], sharding).equal(q)


def test_explain_says_mode_and_bytes(cp: ContextParallel) -> None:
    (q, k, v), sharding = make(cp)
    said = str(cp.explain(q, k, v, sharding, is_causal=True, chunk_size=4))
    assert said.startswith("all_to_all: the others cannot: chunk_size needs whole sequences")
    assert all(mode in said for mode in ("ring", "all_gather", "MB"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0 .*, got 0.1"),
        ({"mode": "round"}, "mode must be one of 'ring', 'all_gather', 'all_to_all', 'auto', got 'round'"),
        ({"mode": "ring", "chunk_size": 4}, "mode must be possible .*, got 'ring': chunk_size needs whole sequences"),
        ({"layout": "thd"}, "layout must be one of 'bshd', 'bhsd', 'sbhd', got 'thd'"),
        ({"window_size": (-2, 0)}, "window_size must be two integers"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have shape \[4\]"),
    ],
)
def test_refusals(cp: ContextParallel, options: dict[str, Any], message: str) -> None:
    (q, k, v), sharding = make(cp)
    with pytest.raises(ValueError, match=message):
        cp.attention(q, k, v, sharding, **options)


def test_refusals_of_shapes(cp: ContextParallel) -> None:
    (q, k, v), sharding = make(cp, tokens=10)
    with pytest.raises(ValueError, match="query must have the 9 tokens that the sharding gives rank 0, got 10"):
        cp.attention(q, k, v, sharding)
    with pytest.raises(ValueError, match=r"tensors\[0\] must have 9 tokens at dim 1, got 10"):
        sharding.shard(q)
    with pytest.raises(ValueError, match=r"sharding must be made by this object's sharding.*got one for rank 1 of 2"):
        cp.attention(q, k, v, shardings([9], 2)[1])
    with pytest.raises(ValueError, match="x must not require a gradient"):
        cp.unshard(q[:, :9].requires_grad_(), sharding)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0, got \[0, 5, 3\]"):
        cp.sharding(cu_seqlens=torch.tensor([0, 5, 3]))
    with pytest.raises(ValueError, match=r"cu_seqlens must be integers, one dimension of them, got \[0, 2\.5\]"):
        cp.sharding(cu_seqlens=[0, 2.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"cu_seqlens must be integers, .* got a int64 tensor of shape .1, 2."):
        cp.sharding(cu_seqlens=torch.tensor([[0, 5]]))
    with pytest.raises(ValueError, match="seq_length must be given, or else cu_seqlens, got none"):
        cp.sharding()
    with pytest.raises(ValueError, match=r"seq_length must be an integer of at least 0, got 2\.5"):
        cp.sharding(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seq_length must be an integer of at least 0, got True"):
        cp.sharding(True)


def test_refuses_what_is_no_group(cp: ContextParallel) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    assert context_parallel(mesh["cp"]).world_size == 1
    with pytest.raises(ValueError, match=r"group must be a mesh of one axis, .* got one of \('dp', 'cp'\)"):
        context_parallel(mesh)
    with pytest.raises(ValueError, match="group must be a ProcessGroup or a DeviceMesh of one axis, got None"):
        context_parallel(None)  # type: ignore[arg-type]


def test_a_model_keeps_the_places_of_a_few_lengths_only() -> None:
    made: list[weakref.ref[Sharding]] = []

    def sharding(length: int) -> Sharding:
        found = Sharding([length], 2, 0, is_packed=False)
        made.append(weakref.ref(found))
        return found

    spread = ContextSharding(SimpleNamespace(sharding=sharding))  # type: ignore[arg-type]
    for length in [*range(1, 100), 99]:
        assert spread._sharding_of(torch.zeros(1, length), Context()).num_tokens == length
    assert len(made) == 99 and sum(ref() is not None for ref in made) <= 16
