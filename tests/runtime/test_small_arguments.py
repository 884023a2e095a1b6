"""Lengths, labels, scales and other small arguments at any address: the kernels are those of aligned ones."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import powertrain
from powertrain import ops
from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.backends.zero_padding import zero_tail
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.merge import merge_attentions
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.fp8.formulas import Quantized
from powertrain.ops.fp8.gemm import fp8_gemm
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.moe import moe_permute, moe_route, moe_unpermute
from powertrain.ops.rope import RopeTable
from powertrain.runtime.launch import Kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings

META = torch.device("meta")
BF16, INT32, INT64, FLOAT = torch.bfloat16, torch.int32, torch.int64, torch.float32
Small = Callable[..., Tensor]

compiled = pytest.mark.skipif(settings().interpret, reason="nothing is specialized under the interpreter")


def _small(elements_before: int) -> Small:
    """A maker of tensors that begin `elements_before` elements behind a multiple of 16 bytes."""

    def make(*shape: int, dtype: torch.dtype = INT32) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.empty(elements_before + count, dtype=dtype, device=META)[elements_before:].view(shape)

    return make


def _empty(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=grad)


def _backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def _cross_entropy(small: Small) -> None:
    for early in (False, True):
        for reduction in ("mean", "none"):
            target = small(64, dtype=INT64)
            loss = powertrain.cross_entropy(
                _empty(64, 1024, grad=True), target, reduction=reduction, grad_in_forward=early
            )
            loss.backward(small(*loss.shape, dtype=FLOAT))


def _linear_cross_entropy(small: Small) -> None:
    for reduction in ("mean", "none"):
        x, weight, main_grad = _empty(128, 64, grad=True), _empty(512, 64, grad=True), _empty(512, 64, dtype=FLOAT)
        loss = powertrain.linear_cross_entropy(
            x, weight, small(128, dtype=INT64), reduction=reduction, main_grad=main_grad
        )
        loss.backward(small(*loss.shape, dtype=FLOAT))


def _log_probs(small: Small) -> None:
    result = powertrain.linear_log_probs(
        _empty(128, 64, grad=True), _empty(512, 64, grad=True), small(128, dtype=INT64), entropy=True
    )
    results = [result[0], result[1]]
    torch.autograd.backward(results, [small(*x.shape, dtype=FLOAT) for x in results])


def _decode(small: Small) -> None:
    for batch, page_size in ((64, 0), (1, 0), (64, 16), (64, 64)):
        pages = (batch * 1024 // page_size, page_size) if page_size else (batch, 1024)
        cache = _empty(*pages, 8, 128)
        decode_attention(
            _empty(batch, 1, 32, 128), cache, cache, small(batch),
            key_new=_empty(batch, 1, 8, 128), value_new=_empty(batch, 1, 8, 128),
            page_table=small(batch, 1024 // page_size) if page_size else None, sinks=small(32, dtype=BF16),
            alibi_slopes=small(32, dtype=FLOAT),
        )  # fmt: skip


def _decode_packed(small: Small) -> None:
    cache = _empty(8192, 64, 8, 128)
    for queries, most in ((543, 512), (32, 1)):
        decode_attention(
            _empty(queries, 32, 128), cache, cache, small(32), page_table=small(32, 512), cu_seqlens_q=small(33),
            max_seqlen_q=most, sinks=small(32, dtype=BF16),
        )  # fmt: skip


def _decode_latent(small: Small) -> None:
    cache = _empty(64 * 128, 64, 1, 576)
    decode_attention(_empty(64, 1, 128, 576), cache, None, small(64), page_table=small(64, 128), head_dim_v=512)


def _padded(backend: str, *head_dims: int) -> Callable[[Small], None]:
    def call(small: Small) -> None:
        for d in head_dims:
            q, k, v = (_empty(2, 512, heads, d, grad=True) for heads in (8, 2, 2))
            _backward(
                attention(
                    q, k, v, is_causal=True, alibi_slopes=small(8, dtype=FLOAT), sinks=small(8, dtype=BF16),
                    seqused_q=small(2), seqused_k=small(2), backend=backend,
                )
            )  # fmt: skip

    return call


def _packed(backend: str, *head_dims: int) -> Callable[[Small], None]:
    def call(small: Small) -> None:
        for d in head_dims:
            q, k, v = (_empty(1024, heads, d, grad=True) for heads in (8, 2, 2))
            _backward(
                varlen_attention(
                    q, k, v, small(3), small(3), 512, 512, seqused_q=small(2), seqused_k=small(2), is_causal=True,
                    backend=backend,
                )
            )  # fmt: skip

    return call


def _masked(small: Small) -> None:
    q, k, v = (_empty(2, 512, heads, 64, grad=True) for heads in (8, 2, 2))
    seed = small(2, dtype=INT64)
    _backward(attention(q, k, v, is_causal=True, dropout_p=0.1, dropout_seed=seed, backend="triton"))
    _backward(attention(q, k, v, is_causal=True, document_ids=small(2, 512), backend="triton"))
    _backward(attention(q, k, v, is_causal=True, prefix_lengths=small(2), backend="triton"))
    _backward(attention(q, k, v, attn_bias=_empty(8, 512, 512, grad=True), seqused_k=small(2), backend="triton"))


def _merge(small: Small) -> None:
    outs = [_empty(2, 64, 8, 128, grad=True) for _ in range(2)]
    lses = [small(2, 8, 64, dtype=FLOAT).requires_grad_() for _ in range(2)]
    out, lse = merge_attentions(outs, lses)
    torch.autograd.backward([out, lse], [torch.empty_like(out), small(*lse.shape, dtype=FLOAT)])


def _rope(small: Small) -> None:
    table = RopeTable(*(_empty(512, 64, dtype=FLOAT) for _ in range(2)))
    q, k = _empty(2, 64, 8, 128), _empty(2, 64, 2, 128)
    powertrain.rope(q, k, table=table, position_ids=small(2, 64, dtype=INT64))
    powertrain.rope(q, k, table=table, offset=small(2))
    powertrain.rope(q[0], k[0], table=table, layout="thd", cu_seqlens=small(5))


def _grouped(small: Small) -> None:
    y = powertrain.grouped_gemm(_empty(512, 256, grad=True), _empty(4, 256, 256, grad=True), small(4))
    _backward(y)


def _fp8(small: Small) -> None:
    x = _empty(512, 512)
    fp8_quantize(x, "tensor", scale=small(1, dtype=FLOAT))
    data = _empty(512, 512, dtype=torch.float8_e4m3fn)
    for shape in ((1,), (512,)):
        for backend in ("triton", "hopper"):
            a, b = (Quantized(data, small(*shape, dtype=FLOAT)) for _ in range(2))
            fp8_gemm(a, b, out_dtype=BF16, backend=backend)
    for by, width in (("row", 500), ("block", 512)):
        y = fp8_grouped_gemm(_empty(512, width, grad=True), _empty(4, 256, width, grad=True), small(4), by=by)
        _backward(y)


def _moe(small: Small) -> None:
    weights, _ = moe_route(_empty(64, 16, grad=True), small(16, dtype=FLOAT), top_k=6, score="sigmoid")
    weights.backward(small(64, 6, dtype=FLOAT))
    rows, _, _ = moe_permute(_empty(64, 256, grad=True), torch.empty(64, 6, dtype=INT32, device=META), 16)
    _backward(rows)
    _backward(moe_unpermute(_empty(384, 256, grad=True), small(64, 6), small(64, 6, dtype=FLOAT)))


def _optimizer(small: Small) -> None:
    parameter = torch.nn.Parameter(_empty(3000))
    parameter.grad = torch.empty_like(parameter)
    optimizer = powertrain.AdamW([parameter])
    optimizer.param_groups[0]["lr"] = small(1, dtype=FLOAT)[0]
    optimizer.found_inf = small(1, dtype=FLOAT)  # a GradScaler's
    optimizer.step(grad_factor=small(1, dtype=FLOAT))


def _tail(small: Small) -> None:
    zero_tail(_empty(64, 4, 64), small(3))


CALLS: dict[str, Callable[[Small], None]] = {
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_log_probs": _log_probs,
    "decode_attention": _decode,
    "packed decode_attention": _decode_packed,
    "latent decode_attention": _decode_latent,
    "attention, triton": _padded("triton", 64, 256),
    "attention, hopper": _padded("hopper", 128, 192, 256, 512),
    "varlen_attention, triton": _packed("triton", 128),
    "varlen_attention, hopper": _packed("hopper", 128, 192, 256, 512),
    "masks": _masked,
    "merge_attentions": _merge,
    "rope": _rope,
    "grouped_gemm": _grouped,
    "fp8": _fp8,
    "moe": _moe,
    "AdamW": _optimizer,
    "zero_tail": _tail,
}


@compiled
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("elements", [1, 2])
def test_a_small_argument_at_any_address_compiles_nothing_else(name: str, elements: int) -> None:
    found = []
    for before in (0, elements):
        with record("sm_90") as wanted:
            CALLS[name](_small(before))
        found.append({spec.key: f"{spec.kernel.name} {sorted(spec.alignment)}" for spec in wanted.specs})
    aligned, anywhere = found
    assert aligned
    assert anywhere.keys() == aligned.keys(), sorted(set(anywhere.values()) ^ set(aligned.values()))


@compiled
def test_rows_of_rope_are_vectors_beside_position_ids() -> None:
    """The ids' strides, mostly 1, are none of those that must be multiples of 16."""
    table = RopeTable(*(_empty(512, 64, dtype=FLOAT) for _ in range(2)))
    with record("sm_90") as wanted:
        powertrain.rope(_empty(2, 64, 8, 128), table=table, position_ids=torch.empty(2, 64, dtype=INT64, device=META))
    (spec,) = wanted.specs
    assert spec.aligned["stride_qo"] == spec.aligned["q_ptr"] == 16


def test_attention_has_every_name_of_its_list() -> None:
    names = [m.name for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, Kernel)]
    assert {name for kernel in kernels for name in kernel.pointers} >= SMALL
    assert all(name not in kernel.aligned_pointers for kernel in kernels for name in SMALL)


def _at(x: Tensor, device: torch.device) -> Tensor:
    """x one element behind the begin of a tensor."""
    return torch.cat([x.flatten()[:1], x.flatten()]).to(device)[1:].view(x.shape)


def test_decoding_after_prefills(device: torch.device) -> None:
    """seq_lens[1:] and block_table[1:], as a batch of prefills and decodes gives them."""
    torch.manual_seed(0)
    query, cache = torch.randn(3, 1, 4, 32, device=device), torch.randn(8, 16, 2, 32, device=device)
    lengths = torch.tensor([9, 17, 32, 5], dtype=INT32, device=device)
    table = torch.tensor([[7], [0], [2], [4]], dtype=INT32, device=device).repeat(1, 3)
    table[:, 1] += 1
    out = decode_attention(query, cache, cache, lengths[1:], page_table=table[1:])
    expected = decode_attention(query, cache, cache, lengths[1:].clone(), page_table=table[1:].clone())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    keys = torch.cat([cache[2], cache[3]]).repeat_interleave(2, 1).transpose(0, 1)  # [heads, keys, dims] of length 32
    exact = F.scaled_dot_product_attention(query[1].transpose(0, 1), keys, keys)
    torch.testing.assert_close(out[1].transpose(0, 1), exact)


def test_packed_sequences_and_positions(device: torch.device) -> None:
    torch.manual_seed(0)
    q = torch.randn(24, 2, 32, device=device)
    starts = torch.tensor([0, 7, 24], dtype=INT32)
    used = torch.tensor([5, 17], dtype=INT32)
    options: dict[str, Any] = {"max_seqlen_q": 17, "max_seqlen_k": 17, "is_causal": True}
    out = varlen_attention(q, q, q, _at(starts, device), seqused_k=_at(used, device), **options)
    expected = varlen_attention(q, q, q, starts.to(device), seqused_k=used.to(device), **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    table = powertrain.rope_table(32, 32, device=device)
    ids = torch.randperm(24)
    turned = powertrain.rope(q[None], table=table, position_ids=_at(ids[None], device))
    torch.testing.assert_close(turned, powertrain.rope(q[None], table=table, position_ids=ids[None].to(device)))
