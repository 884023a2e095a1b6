"""Every op at random sizes beside the time its bytes or products take: finds sizes at which an op is slower than at its
other sizes, which no table of chosen sizes shows.

The floor of an op bound by memory is a copy of as many bytes; of an op bound by products torch's own matrix products of
the same sizes, with a copy of the bytes between them not counted. Both are timed in turns with the op. A share is the
floor's time divided by ours. Ops bound by memory are timed beside the same formula in plain PyTorch too, compiled by
torch.compile for each size.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ahead
from benchmarks.peers import set_up_torch_compile
from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.linear_cross_entropy import linear_cross_entropy
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.ops.lora_linear import lora_linear
from powertrain.ops.moe import moe_permute, moe_unpermute
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import rope_table
from powertrain.ops.softmax import scaled_softmax
from powertrain.runtime.errors import PowertrainError
from powertrain.testing.bench import measure

MOST_BYTES = 1 << 30  # of an op's largest tensor
FAR = 0.9  # of the op's median share: below it a size is listed
BEHIND = 0.97  # torch.compile's time divided by ours: below it a size is listed
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILERS = 6  # processes that compile at once, each with the tensors of a size


Sizes = Callable[[random.Random, int], tuple[int, int]]  # of a source and the widest row: rows and columns


class Draw(NamedTuple):
    op: str
    size: str
    # device -> the call, its differentiable inputs
    build: Callable[[str], tuple[Callable[[], Any], list[Tensor]]]
    floor: Callable[[], Callable[[], Any]]  # of the forward
    floor_both: Callable[[], Callable[[], Any]] | None  # of forward and backward; None: no backward
    plain: Callable[..., Any] | None = None  # of the differentiable inputs: the formula in plain PyTorch


def _log(source: random.Random, low: int, high: int, multiple: int = 1) -> int:
    return max(low, round(math.exp(source.uniform(math.log(low), math.log(high))) / multiple) * multiple)


def _randn(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def _copy(num_bytes: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        source = torch.empty(max(num_bytes // 2, 16), dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def _products(*sizes: tuple[int, int, int]) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        pairs = [
            (_randn(m, k, device="cuda", grad=False), _randn(k, n, device="cuda", grad=False)) for m, n, k in sizes
        ]
        return lambda: [a @ b for a, b in pairs]

    return make


def _rows(source: random.Random, widest: int, narrowest: int = 64) -> tuple[int, int]:
    width = _log(source, narrowest, widest, source.choice((1, 8, 64, 128)))
    # enough bytes that a launch does not count
    return max(1, min(_log(source, 1 << 23, MOST_BYTES // 2) // width, 1 << 20)), width


def _norm(source: random.Random, sizes: Sizes = _rows) -> Draw:
    rows, width = sizes(source, 32768)
    op, biased, residual = source.choice((rms_norm, layer_norm)), source.random() < 0.5, source.random() < 0.4
    dtype = source.choice((torch.bfloat16, torch.bfloat16, torch.float32))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, w = _randn(rows, width, device=device, dtype=dtype), _randn(width, device=device, dtype=dtype)
        b = _randn(width, device=device, dtype=dtype) if biased else None
        h = _randn(rows, width, device=device, dtype=dtype) if residual else None
        leaves = [t for t in (x, w, b, h) if t is not None]
        return lambda: op(x, w, b, residual=h), leaves

    def plain(x: Tensor, w: Tensor, *rest: Tensor) -> Any:
        b, h = rest[0] if biased else None, rest[-1] if residual else None
        total = x if h is None else x + h
        if op is layer_norm:
            y = F.layer_norm(total, (width,), w, b)
        else:
            y = F.rms_norm(total, (width,), w, 1e-6)
            y = y if b is None else y + b
        return y if h is None else (y, total)

    each = rows * width * dtype.itemsize
    # backward: dy, the sum or x, dx; with a residual also its gradient
    forward, backward = (4, 4) if residual else (2, 3)
    name = f"{rows}x{width} {str(dtype)[6:]}{' bias' * biased}{' residual' * residual}"
    return Draw(op.__name__, name, build, _copy(forward * each), _copy((forward + backward) * each), plain)


def _activation(source: random.Random, sizes: Sizes = _rows) -> Draw:
    rows, width = sizes(source, 65536)
    gated = source.random() < 0.6
    kind = source.choice(("swiglu", "geglu", "geglu_tanh") if gated else ("gelu", "gelu_tanh", "silu", "relu_squared"))
    biased = source.random() < 0.3

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        wide = 2 * width if gated else width
        x = _randn(rows, wide, device=device)
        b = _randn(wide, device=device) if biased else None
        leaves = [x] if b is None else [x, b]
        return (lambda: gated_activation(x, kind, bias=b) if gated else activation(x, kind, b)), leaves

    def plain(x: Tensor, b: Tensor | None = None) -> Tensor:
        x = x if b is None else x + b
        gate = x[:, :width]
        if "gelu" in kind or "geglu" in kind:
            y = F.gelu(gate, approximate="tanh" if kind.endswith("tanh") else "none")
        else:
            y = F.relu(gate).square() if kind == "relu_squared" else F.silu(gate)
        return y * x[:, width:] if gated else y

    each = rows * width * 2
    forward, backward = (3, 5) if gated else (2, 3)
    floors = _copy(forward * each), _copy((forward + backward) * each)
    return Draw(kind, f"{rows}x{width}{' bias' * biased}", build, *floors, plain)


def _rope(source: random.Random) -> Draw:
    batch, length = source.choice((1, 2, 3, 4)), _log(source, 512, 16384)
    heads, kv = source.choice(((8, 8), (32, 8), (28, 4), (12, 1), (64, 8), (40, 40)))
    dim = source.choice((64, 72, 80, 96, 128, 160, 192, 256))
    turned, interleaved = source.choice((dim, dim, dim // 4 * 2)), source.random() < 0.3

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        q, k = (_randn(batch, length, n, dim, device=device) for n in (heads, kv))
        placed = table.to(device)
        return lambda: rope(q, k, table=placed, interleaved=interleaved), [q, k]

    # a model makes cos and sin once, so they are not part of the compiled function
    table = rope_table(turned, length, device=_DEVICE)
    cos, sin = table.cos[:, None], table.sin[:, None]

    def plain(q: Tensor, k: Tensor) -> Any:
        def rotate(x: Tensor) -> Tensor:
            of = x[..., :turned].float()
            a, b = of.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else of.chunk(2, -1)
            both = a * cos - b * sin, b * cos + a * sin
            y = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
            return torch.cat((y.to(x.dtype), x[..., turned:]), -1)

        return rotate(q), rotate(k)

    moved = 2 * 2 * batch * length * (heads + kv) * dim
    name = f"B{batch} S{length} H{heads}/{kv} D{dim} of which {turned}{' interleaved' * interleaved}"
    return Draw("rope", name, build, _copy(moved), _copy(2 * moved), plain)


def _softmax(source: random.Random) -> Draw:
    batch, heads = source.choice((1, 2, 4)), source.choice((8, 12, 16))
    queries, causal = _log(source, 64, 4096, source.choice((1, 8, 64))), source.random() < 0.5
    keys = queries if causal else _log(source, 64, 8192, source.choice((1, 8, 64)))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x = _randn(batch, heads, queries, keys, device=device)
        return lambda: scaled_softmax(x, scale=0.1, is_causal=causal), [x]

    def plain(x: Tensor) -> Tensor:
        scores = 0.1 * x.float()
        if causal:
            at = torch.arange(queries, device=x.device)
            scores = scores.masked_fill(at > at[:, None], -math.inf)
        return scores.softmax(-1).to(x.dtype)

    each = batch * heads * queries * keys * 2
    # a causal softmax reads half of its scores and writes all
    forward, backward = (1.5, 2) if causal else (2, 3)
    name = f"B{batch} H{heads} {queries}x{keys}{' causal' * causal}"
    floors = _copy(int(forward * each)), _copy(int((forward + backward) * each))
    return Draw("scaled_softmax", name, build, *floors, plain)


def _loss(source: random.Random) -> Draw:
    words = _log(source, 512, 262144, source.choice((1, 8, 64)))
    rows = max(16, min(_log(source, 1 << 24, MOST_BYTES) // (2 * words), 32768))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, target = _randn(rows, words, device=device), torch.zeros(rows, dtype=torch.long, device=device)
        return lambda: cross_entropy(x, target), [x]

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), torch.zeros(rows, dtype=torch.long, device=x.device))

    each = rows * words * 2
    return Draw("cross_entropy", f"{rows}x{words}", build, _copy(each), _copy(3 * each), plain)


def _dropout(source: random.Random, sizes: Sizes = _rows) -> Draw:
    rows, width = sizes(source, 16384)
    p = source.choice((0.0, 0.1))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, b, h = (_randn(*shape, device=device) for shape in ((rows, width), (width,), (rows, width)))
        return lambda: bias_dropout_add(x, b, h, p), [x, b, h]

    def plain(x: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return F.dropout(x + b, p) + h

    each = rows * width * 2
    floors = _copy(3 * each), _copy((3 + (3 if p else 1)) * each)
    return Draw("bias_dropout_add", f"{rows}x{width} p={p}", build, *floors, plain)


def _experts(source: random.Random) -> Draw:
    tokens, width = _log(source, 512, 32768), _log(source, 512, 8192, 64)
    experts, top = source.choice(((8, 2), (64, 6), (128, 8), (256, 8)))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x = _randn(tokens, width, device=device)
        chosen = torch.rand(tokens, experts, device=device).topk(top).indices
        weights = torch.rand(tokens, top, device=device).requires_grad_()

        def call() -> Tensor:
            rows, _, positions = moe_permute(x, chosen, experts)
            return moe_unpermute(rows, positions, weights)

        return call, [x, weights]

    each = tokens * width * 2
    moved = (1 + top) * each
    return Draw("moe_permute, moe_unpermute", f"{tokens}x{width} {top} of {experts}", build, _copy(2 * moved), None)


def _grouped(source: random.Random) -> Draw:
    experts = source.choice((4, 8, 16, 64, 128))
    rows, n, k = _log(source, 512, 32768), _log(source, 256, 8192, 64), _log(source, 256, 8192, 64)

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, w = _randn(rows, k, device=device), _randn(experts, n, k, device=device)
        ends = torch.linspace(0, rows, experts + 1, device="cpu").round().int()[1:].to(device)
        return lambda: grouped_gemm(x, w, ends), [x, w]

    def floor(both: bool) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x, w = _randn(rows, k, device="cuda"), _randn(experts, k, n, device="cuda")
            ends = torch.linspace(0, rows, experts + 1, device="cpu").round().int()[1:].to("cuda")
            product = lambda: torch._grouped_mm(x, w, offs=ends)  # noqa: E731
            grad = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
            return (lambda: torch.autograd.grad(product(), (x, w), grad)) if both else product

        return make

    return Draw("grouped_gemm", f"E{experts} {rows}x{n}x{k}", build, floor(False), floor(True))


def _linear_activation(source: random.Random) -> Draw:
    rows, k = _log(source, 64, 32768), _log(source, 512, 8192, 64)
    n = _log(source, 512, 28672, source.choice((1, 8, 64)))
    kind = source.choice(("swiglu", "geglu", "gelu", "silu"))
    gated = kind in ("swiglu", "geglu")

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, w = _randn(rows, k, device=device), _randn(n, k, device=device)
        up = _randn(n, k, device=device) if gated else None
        return lambda: linear_activation(x, w, kind, up_weight=up), [t for t in (x, w, up) if t is not None]

    # padded to whole vectors, as torch.compile does
    wide = -(-n // 8) * 8 * (1 + gated)
    both = _products((rows, wide, k), (rows, k, wide), (wide, k, rows))
    return Draw("linear_activation", f"{kind} {rows}x{n}x{k}", build, _products((rows, wide, k)), both)


def _lora(source: random.Random) -> Draw:
    rows, n, k = _log(source, 64, 32768), _log(source, 512, 16384, 64), _log(source, 512, 16384, 64)
    rank = source.choice((4, 8, 16, 64))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, w = _randn(rows, k, device=device), _randn(n, k, device=device, grad=False)
        a, b = _randn(rank, k, device=device), _randn(n, rank, device=device)
        return lambda: lora_linear(x, w, a, b), [x, a, b]

    both = _products((rows, n, k), (rows, k, n))
    return Draw("lora_linear", f"{rows}x{n}x{k} rank {rank}", build, _products((rows, n, k)), both)


def _linear_loss(source: random.Random) -> Draw:
    rows, width = _log(source, 256, 16384), _log(source, 512, 8192, 64)
    words = _log(source, 8192, 262144, source.choice((1, 8, 64)))
    op = source.choice((linear_cross_entropy, linear_log_probs))

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        x, w = _randn(rows, width, device=device), _randn(words, width, device=device)
        target = torch.zeros(rows, dtype=torch.long, device=device)
        if op is linear_cross_entropy:
            return lambda: linear_cross_entropy(x, w, target), [x, w]
        return lambda: linear_log_probs(x, w, target).log_probs, [x, w]

    # of words divisible by 64, as a padded vocabulary would be
    padded = -(-words // 64) * 64
    both = _products((rows, padded, width), (rows, width, padded), (padded, width, rows))
    return Draw(op.__name__, f"{rows}x{width}x{words}", build, _products((rows, padded, width)), both)


def _decode(source: random.Random) -> Draw:
    batch, keys = source.choice((1, 2, 4, 16, 32, 64)), _log(source, 512, 65536)
    heads, kv = source.choice(((32, 8), (28, 4), (64, 8), (8, 8), (16, 1), (96, 8)))
    dim, queries, page = (
        source.choice((64, 80, 128, 192, 256)),
        source.choice((1, 1, 1, 2, 4, 8)),
        source.choice((0, 16, 64)),
    )
    keys = min(keys, MOST_BYTES // (batch * kv * dim * 2))
    pages = -(-keys // page) if page else 0

    def build(device: str) -> tuple[Callable[[], Any], list[Tensor]]:
        shape = (batch * pages, page, kv, dim) if page else (batch, keys, kv, dim)
        k, v = (_randn(*shape, device=device, grad=False) for _ in range(2))
        q = _randn(batch, queries, heads, dim, device=device, grad=False)
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages) if page else None
        return lambda: decode_attention(q, k, v, lengths, page_table=table), []

    name = f"B{batch} {queries} of {keys} H{heads}/{kv} D{dim} pages of {page}"
    # read only, where a copy writes half of its bytes
    return Draw("decode_attention", name, build, _copy(2 * batch * keys * kv * dim * 2), None)


KINDS = (
    _norm, _norm, _activation, _rope, _softmax, _loss, _dropout, _experts, _grouped, _linear_activation, _lora,
    _linear_loss, _decode,
)  # fmt: skip


def launch(draw: Draw) -> None:
    """Forward and backward on meta tensors, for a recording; nothing where the op refuses the size by name."""
    call, leaves = draw.build("meta")
    with suppress(PowertrainError):
        outs = [out for out in results(call()) if out is not None and out.requires_grad]
        if leaves:
            torch.autograd.grad(outs, leaves, [torch.empty_like(out) for out in outs], allow_unused=True)


def results(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _draws(count: int, seed: int) -> list[Draw]:
    source = random.Random(seed)
    return [KINDS[i % len(KINDS)](source) for i in range(count)]


def _compile_plain(count: int, seed: int, i: int) -> None:
    """torch.compile's kernels of a size into its cache on disk, in a process of its own."""
    set_up_torch_compile()
    draw = _draws(count, seed)[i]
    _, leaves = draw.build("cuda")
    assert draw.plain is not None
    plain = torch.compile(draw.plain, dynamic=False)
    with torch.no_grad():
        plain(*leaves)
    _gradients(lambda: plain(*leaves), leaves)()
    torch.cuda.empty_cache()


def _gradients(call: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], Any]:
    """Forward and backward."""
    grads = [torch.randn_like(out) for out in results(call())]
    return lambda: torch.autograd.grad(results(call()), leaves, grads)


def _times(draw: Draw) -> Iterator[tuple[str, dict[str, float]]]:
    """Way, ms of the floor, of ours and, where there is one, of torch.compile."""
    call, leaves = draw.build("cuda")
    calls = {"ours": call}
    if draw.plain is not None:
        compiled = torch.compile(draw.plain, dynamic=False)
        calls["torch.compile"] = lambda: compiled(*leaves)
    with torch.no_grad():
        yield "forward", _ms({"floor": draw.floor(), **calls})
    if draw.floor_both is not None and leaves:
        steps = {name: _gradients(function, leaves) for name, function in calls.items()}
        yield "both", _ms({"floor": draw.floor_both(), **steps})


def _ms(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    return {name: timing.ms for name, timing in measure(variants, seconds=0.1).items()}


def run(count: int = 390, seconds: float = math.inf, seed: int = 0) -> Iterator[str]:
    """`count` sizes, or as many as `seconds` allow: a line for each, then those that are slow for their op."""
    end = time.monotonic() + seconds
    set_up_torch_compile()
    draws = _draws(count, seed)
    yield ahead.build(partial(launch, draw) for draw in draws)
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        plain = [i for i, draw in enumerate(draws) if draw.plain is not None]
        futures = [pool.submit(_compile_plain, count, seed, i) for i in plain]
        # what has not been compiled by then compiles when it is timed
        wait(futures, timeout=None if math.isinf(seconds) else seconds / 3)
        pool.shutdown(cancel_futures=True)
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for draw in draws:
        if time.monotonic() > end:
            break
        try:
            for way, ms in _times(draw):
                ours = ms.pop("ours")
                for name, other in ms.items():
                    found[draw.op, way, name].append((other / ours, f"{draw.size}: {other:.4f} / {ours:.4f} ms"))
                # at once, so that a run that is stopped early has printed what it measured
                yield f"{draw.op} {draw.size} {way}: {ours:.4f} ms, " + ", ".join(
                    f"{name} {other:.4f}" for name, other in ms.items()
                )
        except (PowertrainError, RuntimeError) as error:
            yield f"{draw.op} {draw.size}: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
    for (op, way, name), values in sorted(found.items()):
        values.sort()
        middle = median(value for value, _ in values)
        ends = f"{values[0][0]:.2f} to {values[-1][0]:.2f}"
        yield f"{op} {way}: {len(values)} sizes, time of {name} by ours {ends}, median {middle:.2f}"
        least = FAR * middle if name == "floor" else BEHIND
        yield from (f"    {value:.2f} {line}" for value, line in values if value < least)
