"""Index structure of packed attention on a GPU: every backend, 16 bits, sizes of several tiles, forward and backward.

As tests/ops/attention/test_index_structure.py, which has the small ones; torch.empty is poisoned by conftest.
"""

from collections.abc import Iterator

import pytest
import torch

from powertrain.ops.attention import NoBackendError, decode_attention, varlen_attention
from powertrain.ops.attention.decode import decode_attention_ref
from tests.compat.block_biases import KINDS, check_bias
from tests.ops.attention.attention_launches import any_order
from tests.ops.attention.index_structure import WAYS, check, check_backward, compare, draw, run, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# heads, head dims, largest sequence: one tile and several of every kernel; packed tiles of few queries; wide ones
SIZES = (((4, 2), (128, 128), 300), ((4, 4), (64, 64), 700), ((8, 1), (128, 128), 150), ((2, 2), (256, 256), 200))
BACKENDS = ("triton", "hopper", "chunked", "reference")  # that give an LSE which is differentiated


@pytest.fixture(autouse=True)
def _sums_in_any_order() -> Iterator[None]:
    with any_order():
        yield


def _check(way: str, seed: int, backend: str, dtype: torch.dtype, **options: bool) -> bool:
    """Whether the backend took it."""
    heads, dims, largest = SIZES[seed % len(SIZES)]
    try:
        check(draw(way, seed, largest, 6), backend, CUDA, dtype, heads=heads, dims=dims, seed=seed, **options)
    except NoBackendError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_structure(backend: str, way: str, dtype: torch.dtype) -> None:
    _sweep(backend, way, dtype, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_any_structure_at_length(backend: str, way: str, dtype: torch.dtype) -> None:
    _sweep(backend, way, dtype, range(8, 80))


def _sweep(backend: str, way: str, dtype: torch.dtype, seeds: range) -> None:
    taken = [_check(way, seed, backend, dtype) for seed in seeds]
    if not any(taken):
        assert backend == "hopper" and torch.cuda.get_device_capability() != (9, 0), f"{backend} took nothing"
        pytest.skip("the Hopper kernels are for sm_90")


@pytest.mark.parametrize("way", WAYS)
def test_flash_without_lse(way: str) -> None:
    """PyTorch's flash-2, which writes rows of sequences only."""
    taken = 0
    for seed in range(12):
        heads, dims, largest = SIZES[seed % len(SIZES)]
        s = draw(way, seed, largest, 6)
        torch.manual_seed(seed)
        given, dout = tensors(s, heads, dims, CUDA, torch.bfloat16)
        exact = run(s, [x.double() for x in given], dout.double(), "reference")
        said = {name: torch.tensor(x, dtype=torch.int32, device=CUDA) for name, x in s.said.items()}
        leaves = [x.requires_grad_() for x in given]
        try:
            out = varlen_attention(*leaves, **said, **s.mask, backend="flash")
        except NoBackendError:
            continue
        grads = torch.autograd.grad(out, leaves, dout)
        found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
        compare(s, found, exact, torch.bfloat16, f"flash, seed {seed}")
        taken += 1
    assert taken or way != "self"


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper backward is for sm_90",
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_hopper_in_turn(way: str, dtype: torch.dtype) -> None:
    """The Hopper backward whose tiles add in turn, which is taken where the same bits are wanted every time."""
    for seed in range(8):
        heads, dims, largest = SIZES[seed % len(SIZES)]
        s = draw(way, seed, largest, 6)
        with any_order(False):
            check_backward(s, CUDA, dtype, seed, heads=heads, dims=dims)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_backward_of_a_larger_attention(way: str, dtype: torch.dtype) -> None:
    for seed in range(8):
        heads, dims, largest = SIZES[seed % len(SIZES)]
        check_backward(draw(way, seed, largest, 6), CUDA, dtype, seed, heads=heads, dims=dims)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_xformers(kind: str, dtype: torch.dtype) -> None:
    """Gappy, padded and paged keys; groups; few queries, which are decoded."""
    for seed in range(12):
        check_bias(kind, seed, CUDA, dtype, d=64 if seed % 2 else 128, largest=200)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_decoding(dtype: torch.dtype, paged: bool) -> None:
    """Entries and pages in any order and shared, empty caches and full ones, with NaN behind each length."""
    for seed in range(8):
        torch.manual_seed(seed)
        rows, page, entries = 256, 16, 5
        caches = [torch.randn(entries, rows, 2, 128, device=CUDA).to(dtype) for _ in range(2)]
        lengths = torch.tensor([0, 1, rows, 100, 37], dtype=torch.int32, device=CUDA)[torch.randperm(5)]
        options = {"cache_batch_idx": torch.randint(0, entries, (5,), device=CUDA)}
        if paged:
            pages = entries * rows // page
            caches = [x.view(pages, page, 2, 128) for x in caches]
            options = {"page_table": torch.randint(0, pages, (5, rows // page), device=CUDA).int()}
        query = torch.randn(5, 1 + seed % 3, 8, 128, device=CUDA).to(dtype)
        out, lse = decode_attention(query, *caches, lengths, return_lse=True, **options)
        exact, exact_lse = decode_attention_ref(query.double(), *(x.double() for x in caches), lengths, **options)
        assert torch.equal(lse.isfinite(), exact_lse.isfinite()), f"seed {seed}"
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        finite = lse.isfinite()
        torch.testing.assert_close(lse[finite].double(), exact_lse[finite].double(), rtol=1e-3, atol=1e-3)
