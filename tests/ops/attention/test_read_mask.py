"""Ranges of visible positions from documents and masks, and attention whose blocks are passed over by them."""

import random

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention
from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.ops.attention.triton.read_mask import (
    GRANULE,
    has_ranges,
    is_regular,
    ranges_of_keys,
    ranges_of_queries,
    read_mask,
)
from powertrain.runtime.target import Target
from tests.torch_setup import HAS_GPU

pytestmark = pytest.mark.kernels


def _operands(queries: int, keys: int, batch: int, bias: Tensor | None, ids: tuple[Tensor, Tensor] | None) -> Operands:
    device = bias.device if bias is not None else ids[0].device if ids else torch.device("cpu")
    tensors: list[Tensor | None] = [None] * 11
    tensors[0] = bias
    if ids:
        tensors[4:6] = ids
    args = OpArguments(*tensors, "bshd", 1.0, 0.0, 0.0, -1, -1, 0, False)  # type: ignore[arg-type]
    q, k = (torch.empty(batch, n, 2, 16, device=device) for n in (queries, keys))
    return Operands.of(q, k, k, args)


def _mask(draws: random.Random, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Padding, a causal mask, a band, blocks or noise; shared by sequences or not, rows at any stride."""
    shape = (draws.choice((1, batch)), 1, draws.choice((1, queries, queries, queries)), keys)
    i, j = torch.arange(shape[2], device=device)[:, None], torch.arange(keys, device=device)
    rows = torch.rand(shape[0], 1, 1, 1, device=device)
    kinds = (
        j < rows * keys, j >= rows * keys, (j <= i).expand(shape), (i - j).abs() < 9 + 60 * rows,
        ((i // 70) == (j // 70)) & (rows > 0.2), torch.rand(shape, device=device) < 0.02, rows >= 0,
    )  # fmt: skip
    mask = draws.choice(kinds).expand(shape)
    if draws.random() < 0.3:
        return mask.mT.contiguous().mT
    return mask if draws.random() < 0.3 else mask.contiguous()


def _ids(draws: random.Random, batch: int, size: int, device: torch.device) -> Tensor:
    """Ascending, in any order, or scattered; some negative."""
    rows = [draws.choices(range(-1, 5), k=size) for _ in range(batch)]
    if draws.random() < 0.7:
        names = draws.sample(range(-1, 9), 6)
        rows = [[names[n + 1] for n in sorted(row)] for row in rows]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _holds(ranges: Tensor, seen: Tensor) -> bool:
    """ranges [b, granules, 4] cover what seen [b, own, other] says, and name as full what all see alone."""
    for b, rows in enumerate(seen.cpu()):
        for n, (begin, end, full_begin, full_end) in enumerate(ranges[b].tolist()):
            own = rows[n * GRANULE.value : (n + 1) * GRANULE.value]
            found = own.any(0).nonzero().flatten().tolist()
            if found and not (begin <= found[0] and found[-1] < end):
                return False
            if not found and begin < end:
                return False
            if not own[:, max(0, full_begin) : full_end].all():
                return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_ranges_cover_what_is_seen(seed: int, device: torch.device) -> None:
    draws = random.Random(seed)
    torch.manual_seed(seed)
    batch, queries, keys = draws.choice((1, 2)), draws.randint(1, 300), draws.randint(1, 300)
    if draws.random() < 0.6:
        mask = _mask(draws, batch, queries, keys, device)
        operands = _operands(queries, keys, batch, mask, None)
        seen = mask[:, 0].expand(batch, queries, keys)
    else:
        ids = _ids(draws, batch, queries, device), _ids(draws, batch, keys, device)
        operands = _operands(queries, keys, batch, None, ids)
        seen = (ids[0][:, :, None] == ids[1][:, None]) & (ids[0] >= 0)[:, :, None]
    read = read_mask(operands.args.bias, operands.target)
    assert has_ranges(operands.args, read)
    for ranges, visible in ((ranges_of_queries(operands, read), seen), (ranges_of_keys(operands, read), seen.mT)):
        assert ranges is not None and _holds(ranges, visible)


def test_a_causal_mask_leaves_half_of_the_keys_out(device: torch.device) -> None:
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool, device=device).tril()
    operands = _operands(256, 256, 1, mask, None)
    ranges = ranges_of_queries(operands, read_mask(mask, operands.target))
    assert ranges is not None
    assert ranges[0].tolist() == [[0, 64, 64, 64], [0, 128, 0, 64], [0, 192, 0, 128], [0, 256, 0, 192]]


def test_a_mask_a_head_has_no_ranges(device: torch.device) -> None:
    mask = torch.ones(1, 2, 9, 9, dtype=torch.bool, device=device)
    operands = _operands(9, 9, 1, mask, None)
    assert not has_ranges(operands.args, read_mask(mask, operands.target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("way", ["rows", "expanded", "transposed"])
def test_rows_of_any_stride_are_copied(
    dtype: torch.dtype, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.ops.attention.triton.read_mask.has_descriptors", lambda target: True)
    bias = (torch.randn(2, 3, 37, 41, device=device) > 0).to(dtype)
    bias = {"rows": bias, "expanded": bias[:, :1].expand_as(bias), "transposed": bias.mT}[way]
    copy = read_mask(bias, Target.parse("sm_90")).bias
    assert copy is not None and is_regular(copy) and copy.shape[1] == (1 if way == "expanded" else 3)
    assert torch.equal(copy.expand_as(bias).to(dtype), bias)


@pytest.mark.parametrize("seed", range(6))
def test_attention_of_masks_and_documents(seed: int, device: torch.device) -> None:
    draws = random.Random(seed)
    torch.manual_seed(seed)
    batch, queries, keys = 2, draws.randint(60, 150), draws.randint(60, 150)
    options = {"attn_bias": _mask(draws, batch, queries, keys, device), "is_causal": draws.random() < 0.5}
    if draws.random() < 0.5:
        options["document_ids"] = _ids(draws, batch, queries, device), _ids(draws, batch, keys, device)
    q = torch.randn(batch, queries, 4, 16, device=device, requires_grad=True)
    k, v = (torch.randn(batch, keys, 2, 16, device=device, requires_grad=True) for _ in range(2))
    found = []
    for backend in ("triton", "reference"):
        out = attention(q, k, v, backend=backend, **options)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_mask_a_head_within_one_document(device: torch.device) -> None:
    """Blocks of one document are seen whole as far as documents go; the mask, which has no ranges, is read there."""
    leaves = [torch.randn(1, 150, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    mask = torch.rand(1, 2, 150, 150, device=device) < 0.5
    ids = torch.zeros(1, 150, dtype=torch.int32, device=device)
    found = []
    for backend in ("triton", "reference"):
        out = attention(*leaves, attn_bias=mask, document_ids=ids, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradient_of_a_bias_that_dq_stores(heads: int, batch: int, device: torch.device) -> None:
    """Stored by the dq kernel where the bias is broadcast to nothing; rows that see no key get zeros."""
    leaves = [torch.randn(2, 70, 3, 16, device=device, requires_grad=True) for _ in range(3)]
    bias = torch.randn(batch, heads, 70, 70, device=device, requires_grad=True)
    lengths = torch.tensor([70, 33], dtype=torch.int32, device=device)
    found = []
    for backend in ("triton", "reference"):
        out = attention(*leaves, attn_bias=bias, is_causal=True, seqused_k=lengths, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), (bias, *leaves)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["triton", "chunked", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_whose_bias_is_minus_infinity(backend: str, is_causal: bool, device: torch.device) -> None:
    """It sees nothing: its result and its gradients are 0, not NaN; a bias that is NaN is not hidden."""
    leaves = [torch.randn(1, 6, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    bias = torch.zeros(1, 1, 6, 6, device=device)
    bias[0, 0, 2], bias[0, 0, 3, :4] = -torch.inf, -torch.inf
    bias.requires_grad_()
    out = attention(*leaves, attn_bias=bias, is_causal=is_causal, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), [*leaves, bias])
    assert not out[0, 2].any() and not grads[0][0, 2].any() and all(x.isfinite().all() for x in grads)
    with torch.no_grad():
        bias[0, 0, 1, 0] = torch.nan
    assert attention(*leaves, attn_bias=bias, backend=backend)[0, 1].isnan().any()


@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("name", ["attn_bias", "document_ids"])
def test_a_graph_reads_the_mask_of_its_replay(name: str) -> None:
    """Copies and ranges are made in the graph, from what the mask's memory holds then."""
    q, k, v = (torch.randn(2, 333, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.arange(333, dtype=torch.int32, device="cuda").expand(2, -1)
    masks = torch.rand(2, 2, 1, 333, 333, device="cuda") < 0.3
    first, second = (ids // 50, ids // 90) if name == "document_ids" else masks
    given = first.clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            attention(q, k, v, backend="triton", **{name: given})
        with torch.cuda.graph(graph, stream=stream):
            out = attention(q, k, v, backend="triton", **{name: given})
        given.copy_(second)
        graph.replay()
        stream.synchronize()
    assert torch.equal(out, attention(q, k, v, backend="triton", **{name: second}))
