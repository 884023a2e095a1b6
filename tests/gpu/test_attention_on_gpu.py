"""Attention where only a GPU can show it: a wide sweep, graphs, no synchronisation, large tensors, memory, inductor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.ops.attention import attention, decode_attention, varlen_attention
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from tests.cuda_graph import captured
from tests.ops.attention.problems import BY_NAME, CONFIGS, Config, errors, make

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEEDS = range(33)  # times the configurations: more than 2,000 problems


def _largest(seed: int) -> int:
    return 260 if seed % 4 else 130  # several tiles of every plan, and one or two


def _differentiate(call: Callable[..., Any], tensors: dict[str, Tensor | None], options: dict[str, Any]) -> None:
    out, lse = call(**tensors, **options)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.zeros_like(lse)])


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_sweep(config: Config) -> None:
    """Sizes, lengths, strides and values at random; compiled ahead, all of a configuration at once."""
    with record() as wanted:
        for seed in SEEDS:
            call, tensors, options = make(config, seed, CUDA, DTYPES[seed % 3], _largest(seed))
            _differentiate(call, tensors, options | {"backend": "triton"})
    assert not prebuild.build(wanted.specs).failures
    bad = [
        f"{config.name}, seed {seed}, {DTYPES[seed % 3]}: {error}"
        for seed in SEEDS
        for error in errors(config, seed, CUDA, DTYPES[seed % 3], _largest(seed))
        if not error.ok
    ]
    assert not bad, "\n".join(bad)


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device=CUDA, dtype=dtype, requires_grad=True) for shape in shapes]


def _equal(ours: Any, theirs: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_graph_of_forward_and_backward(backend: str | None) -> None:
    leaves = _leaves((2, 300, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    dout = torch.randn(2, 300, 8, 64, device=CUDA, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = attention(*leaves, is_causal=True, backend=backend)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    graph, results = captured(step, warm_ups=2)
    for _ in range(2):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        graph.replay()
        _equal(results, step())


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_graph_of_packed_sequences_takes_other_lengths(backend: str | None) -> None:
    """The host knows an upper bound; the lengths are read on the device."""
    leaves = _leaves((1000, 8, 128), (1000, 8, 128), (1000, 8, 128))
    dout = torch.randn(1000, 8, 128, device=CUDA, dtype=torch.bfloat16)
    starts = torch.tensor([0, 300, 300, 777, 1000], dtype=torch.int32, device=CUDA)

    def step() -> tuple[Tensor, ...]:
        out, lse = varlen_attention(
            *leaves, starts, max_seqlen_q=1000, is_causal=True, return_lse=True, backend=backend
        )
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    graph, results = captured(step, warm_ups=2)
    for lengths in ([0, 1000, 1000, 1000, 1000], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [0, 128, 640, 901, 990]):
        starts.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        _equal(results, step())
        assert not any(x[lengths[-1] :].any() for x in (results[0], *results[2:]))
        own = slice(lengths[-2], lengths[-1])
        alone = attention(*(x[None, own] for x in leaves), is_causal=True, backend="triton")
        torch.testing.assert_close(results[0][own], alone[0], rtol=2e-2, atol=2e-2)


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize(
    "name",
    ["causal", "bias-batch", "bias-bool", "alibi-batch", "documents", "prefix", "sinks", "dropout", "lengths", "thd",
     "thd-padded", "thd-everything", "bmghk-groups"],
)  # fmt: skip
def test_the_host_never_waits(name: str, backend: str | None) -> None:
    call, tensors, options = make(BY_NAME[name], 2, CUDA, torch.bfloat16, 130)
    _differentiate(call, tensors, options | {"backend": backend})
    with _no_synchronisation():
        _differentiate(call, tensors, options | {"backend": backend})


def test_the_host_never_waits_for_decoding_and_seeds() -> None:
    q, k, v = (torch.randn(2, n, 4, 64, device=CUDA, dtype=torch.bfloat16) for n in (1, 500, 500))
    lengths = torch.tensor([500, 3], dtype=torch.int32, device=CUDA)
    leaves = _leaves((2, 100, 4, 64), (2, 100, 4, 64), (2, 100, 4, 64))

    def step() -> None:
        decode_attention(q, k, v, lengths)
        attention(*leaves, dropout_p=0.1, backend="triton").sum().backward()  # draws its own seed

    step()
    with _no_synchronisation():
        step()


@pytest.mark.parametrize("backend", [None, "triton", "flash"])
def test_nothing_leaks_from_behind_packed_sequences(backend: str | None) -> None:
    """NaN in rows past cu_seqlens[-1] of inputs and gradients: the bits of zeros there."""
    starts = torch.tensor([0, 70, 70, 201], dtype=torch.int32, device=CUDA)

    def results(behind: float) -> list[Tensor]:
        torch.manual_seed(1)
        leaves = _leaves((230, 4, 64), (230, 4, 64), (230, 4, 64))
        dout = torch.randn(230, 4, 64, device=CUDA, dtype=torch.bfloat16)
        with torch.no_grad():
            for x in (*leaves, dout):
                x[201:] = behind
        out = varlen_attention(*leaves, starts, max_seqlen_q=131, is_causal=True, deterministic=False, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    found = results(float("nan"))
    assert not any(x[201:].any() for x in found)
    _equal(found, results(0.0))


@pytest.mark.parametrize("backend", [None, "triton"])
def test_nothing_leaks_from_behind_lengths(backend: str | None) -> None:
    """NaN beyond seqused_q and seqused_k."""
    used = torch.tensor([130, 0, 77], dtype=torch.int32, device=CUDA)
    behind_all = torch.arange(150, device=CUDA)[None] >= used[:, None]

    def results(behind: float) -> list[Tensor]:
        torch.manual_seed(1)
        leaves = _leaves(*[(3, 150, 4, 64)] * 3)
        dout = torch.randn(3, 150, 4, 64, device=CUDA, dtype=torch.bfloat16)
        with torch.no_grad():
            for x in (*leaves, dout):
                x[behind_all] = behind
        out = attention(*leaves, seqused_q=used, seqused_k=used, is_causal=True, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    found = results(float("nan"))
    assert not any(x[behind_all].any() for x in found)
    _equal(found, results(0.0))


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() and _free_gib() < 60, reason="needs 60 GiB of GPU memory")
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "sequence"])
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_elements_than_an_int32_counts(packed: bool) -> None:
    """Many batch entries, or one long row of tokens: slices at the beginning, across 2^31 and at the end equal the
    same computed alone."""
    shape = (131136, 128, 128) if packed else (65, 2048, 128, 128)
    q, k, v, dout = (torch.empty(shape, device=CUDA, dtype=torch.bfloat16).normal_() for _ in range(4))
    assert q.numel() > 2**31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if packed:  # sequences of 2048, and a last one of 64
        starts = torch.arange(0, 131137, 2048, dtype=torch.int32, device=CUDA)
        starts = torch.cat([starts, starts.new_tensor([131136])])
        out = varlen_attention(*leaves, starts, max_seqlen_q=2048, is_causal=True, backend="triton")
        places = [slice(0, 2048), slice(63 * 2048, 64 * 2048), slice(64 * 2048, 131136)]
    else:
        out = attention(*leaves, is_causal=True, backend="triton")
        places = [slice(0, 1), slice(63, 64), slice(64, 65)]
    grads = torch.autograd.grad(out, leaves, dout)
    for place in places:
        heads = slice(120, 128)
        own = [x.detach()[place][..., heads, :] for x in (q, k, v, dout)]
        own = [(x[None] if packed else x).contiguous() for x in own]
        alone = [x.requires_grad_() for x in own[:3]]
        expected = attention(*alone, is_causal=True, backend="triton")
        found = [out.detach(), *grads]
        for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, alone, own[3])], strict=True):
            assert torch.equal(ours[place][..., heads, :].flatten(), theirs.flatten())


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_memory_is_that_of_the_sequence(layout: str) -> None:
    """Beyond inputs and results, per query and head: in forward at most 8 bytes (descriptors of the tensors, up to 640
    bytes a program), in backward 8 bytes (LSE and delta) and at most 16 for descriptors."""
    heads, extra = 16, {}
    for length in (4096, 16384):
        shape = (length, heads, 128) if layout == "thd" else (1, length, heads, 128)
        leaves = _leaves(shape, shape, shape)
        starts = torch.tensor([0, length // 2, length], dtype=torch.int32, device=CUDA)

        def forward(leaves: list[Tensor] = leaves, starts: Tensor = starts, longest: int = length) -> Tensor:
            if layout == "thd":
                return varlen_attention(*leaves, starts, max_seqlen_q=longest, is_causal=True, backend="triton")
            return attention(*leaves, is_causal=True, backend="triton")

        torch.autograd.grad(forward(), leaves, torch.ones(shape, device=CUDA, dtype=torch.bfloat16))
        dout = torch.ones(shape, device=CUDA, dtype=torch.bfloat16)
        out, peak_forward = _peak(forward)
        grads, peak_backward = _peak(lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout))
        lse_bytes = 4 * heads * length
        extra[length] = (
            peak_forward - out.numel() * 2 - lse_bytes,
            peak_backward - sum(grad.numel() * 2 for grad in grads),
        )
        assert extra[length][0] <= 8 * heads * length, extra
        assert extra[length][1] <= 24 * heads * length, extra


def _peak(function: Callable[[], Any]) -> tuple[Any, int]:
    """(its result, the most bytes that were allocated beyond those before)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_inductor(packed: bool) -> None:
    """One graph, whatever the lengths."""
    starts = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 100, 260], [0, 0, 333], [0, 70, 97])]
    lengths = [int(x[-1]) for x in starts]

    def run(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        q, k, v = q * 1.5, k + 0.5, v * 2
        if packed:
            return varlen_attention(q, k, v, at, max_seqlen_q=512, is_causal=True).sin()
        return attention(q[None], k[None], v[None], is_causal=True)[0].sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for at, length in zip(starts, lengths, strict=True):
        leaves = _leaves(*[(length, 4, 64)] * 3)
        dout = torch.randn(length, 4, 64, device=CUDA, dtype=torch.bfloat16)
        outs = [compiled(*leaves, at), run(*leaves, at)]
        grads = [torch.autograd.grad(out, leaves, dout) for out in outs]
        for ours, theirs in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_dropout_is_the_same_everywhere() -> None:
    """One seed, the same elements in our backends; drawn again, the same under activation checkpointing."""
    seed = torch.tensor([123, 456], device=CUDA)
    leaves = _leaves((2, 200, 4, 64), (2, 200, 4, 64), (2, 200, 4, 64), dtype=torch.float32)
    options: dict[str, Any] = {"dropout_p": 0.3, "is_causal": True}
    found = [
        attention(*leaves, dropout_seed=seed, backend=name, **options) for name in ("triton", "chunked", "reference")
    ]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-4, atol=1e-4)

    def run(*x: Tensor) -> Tensor:
        return attention(*x, backend="triton", **options)

    torch.manual_seed(5)
    kept = run(*leaves)
    expected = torch.autograd.grad(kept.sum(), leaves)
    torch.manual_seed(5)
    again = checkpoint(run, *leaves, use_reentrant=False)
    _equal([again, *torch.autograd.grad(again.sum(), leaves)], [kept, *expected])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_gpu_of_the_machine() -> None:
    """Called while another device is the current one; the bits of the first, if they are alike."""
    torch.manual_seed(0)
    given = [torch.randn(1, 200, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    results = []
    for index in range(torch.cuda.device_count()):
        leaves = [x.to(f"cuda:{index}").requires_grad_() for x in given]
        with torch.cuda.device(0):
            out = attention(*leaves, is_causal=True, backend="triton")
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert out.device == leaves[0].device
        results.append([x.cpu() for x in (out, *grads)])
    if len({torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}) == 1:
        for other in results[1:]:
            _equal(results[0], other)
