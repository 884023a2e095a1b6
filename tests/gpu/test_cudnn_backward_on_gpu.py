"""cuDNN's backward behind the Hopper forward, judged as ours is; graphs, inductor, no synchronisation, poison."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, attention_backward
from powertrain.ops.attention.backend_registry import loaded_backwards
from powertrain.ops.attention.backends import cudnn_backward
from powertrain.ops.attention.hopper import backend as hopper_backend
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order
from tests.ops.attention.problems import BY_NAME, Config, errors, make

pytestmark = ON_SM90
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16)
SEEDS = range(6)
# every layout, heads that share keys, expanded ones, slices of one tensor, more and fewer queries than keys
NAMES = (
    "full", "causal", "mha", "mqa", "bhsd", "sbhd", "expanded-heads", "packed-qkv", "sinks",
)  # fmt: skip
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
TOP_LEFT = (("causal_align", "top_left"),)  # where cuDNN takes other numbers of keys than of queries
WIDE = [
    replace(BY_NAME[name], name=f"{name}-d{d[0]}", head_dims=d, options=(*BY_NAME[name].options, *TOP_LEFT))
    for name in NAMES
    for d in HEAD_DIMS
    if name != "packed-qkv" or d[0] == d[1]  # one tensor has one head dim
]


@pytest.fixture(autouse=True)
def _sums_in_any_order() -> Iterator[None]:
    with any_order():
        yield


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What cuDNN's backward, asked wherever it may be, said call by call; None: it took it."""
    found: list[str | None] = []
    real = cudnn_backward.why_not_cudnn_backward

    def seen(*given: Any) -> str | None:
        reason = real(*given)
        # on meta tensors it is the compile ahead of a cold store, not a call
        if not given[0].query.is_meta:
            found.append(reason)
        return reason

    monkeypatch.setattr(cudnn_backward, "why_not_cudnn_backward", seen)
    for name in ("hopper", "triton"):
        monkeypatch.setitem(hopper_backend._backward_ops, name, cudnn_backward.backward_op)
        monkeypatch.setitem(loaded_backwards, name, cudnn_backward.backward_op)
    return found


def _largest(seed: int) -> int:
    return 700 if seed % 3 == 0 else 260


@pytest.mark.slow
@pytest.mark.parametrize("config", WIDE, ids=lambda config: config.name)
def test_sweep(config: Config, refusals: list[str | None]) -> None:
    """What cuDNN refuses of them (few queries, a single key), the universal kernels do."""
    with record() as wanted:
        for seed in SEEDS:
            call, tensors, options = make(config, seed, CUDA, DTYPES[seed % 2], _largest(seed))
            out, _ = call(**tensors, **options, backend="hopper")
            out.backward(torch.ones_like(out))
    assert not prebuild.build(wanted.specs).failures
    bad = [
        f"{config.name}, seed {seed}, {DTYPES[seed % 2]}: {error}"
        for seed in SEEDS
        for error in errors(config, seed, CUDA, DTYPES[seed % 2], _largest(seed), "hopper", with_lse=False)
        if not error.ok
    ]
    assert not bad, "\n".join(bad)
    assert None in refusals


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * theirs.abs().max().item())


def test_a_graph_and_no_synchronisation(refusals: list[str | None]) -> None:
    leaves = _leaves((2, 300, 8, 192), (2, 300, 2, 192), (2, 300, 2, 128))
    dout = torch.randn(2, 300, 8, 128, device=CUDA, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = attention(*leaves, is_causal=True, backend="hopper")
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for x in (*leaves, dout):
            x.normal_()
    graph.replay()
    _close(results, step())
    assert refusals == [None] * 4


@pytest.mark.parametrize("expand", [False, True], ids=["", "expanded-dout"])
def test_inductor(expand: bool, refusals: list[str | None]) -> None:
    """Slices of one tensor, whose gradients torch.compile was told the strides of."""

    def run(qkv: Tensor) -> Tensor:
        q, k, v = (qkv * 1.5).view(2, 260, 4, 512).split((192, 192, 128), -1)
        out = attention(q, k, v, is_causal=True, backend="hopper")
        return out.float().sum((1, 2, 3)) if expand else out.sin()

    qkv = torch.randn(2, 260, 4 * 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    outs = [f(qkv) for f in (torch.compile(run, fullgraph=True), run)]
    dout = torch.randn_like(outs[1])
    _close(*[torch.autograd.grad(out, [qkv], dout) for out in outs])
    assert None in refusals


def test_a_part_of_the_keys(refusals: list[str | None]) -> None:
    """Two halves of the keys, with the LSE of both, give the whole's gradients."""
    q, k, v = _leaves((2, 512, 4, 192), (2, 600, 4, 192), (2, 600, 4, 128))
    out, lse = attention(q, k, v, return_lse=True, backend="reference")
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        halves = [
            attention_backward(dout, q, x, y, out, lse) for x, y in zip(k.split(300, 1), v.split(300, 1), strict=True)
        ]
    whole = (halves[0][0].float() + halves[1][0].float(), *(torch.cat([x[n] for x in halves], 1) for n in (1, 2)))
    _close([x.float() for x in whole], [x.float() for x in expected])
    assert refusals == [None, None]


def test_results_do_not_depend_on_what_memory_held() -> None:
    leaves = _leaves((1, 333, 4, 256), (1, 333, 4, 256), (1, 333, 4, 256))
    dout = torch.randn(1, 333, 4, 256, device=CUDA, dtype=torch.bfloat16)
    found = []
    for held in (0.0, float("nan")):
        poison = torch.full((1 << 26,), held, device=CUDA)
        del poison  # freed, for what is allocated next
        found.append(torch.autograd.grad(attention(*leaves, is_causal=True, backend="hopper"), leaves, dout))
    assert not any(x.isnan().any() for x in found[1])
    _close(*found)
