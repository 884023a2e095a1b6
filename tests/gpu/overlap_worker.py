"""`python -m tests.gpu.overlap_worker WHAT OUT`, one rank on a GPU of its own: powertrain.parallel over NVLink."""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter, replicated_gemm
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import Choice, Way
from powertrain.parallel.transport.heartbeat import PeerTimeout

TIMEOUT = 20  # seconds the process group waits
K = 136


def force(overlap: Overlap, way: Way) -> None:
    overlap.planner.choices.clear()
    overlap.planner._chosen = lambda product: Choice(way, "forced")  # type: ignore[method-assign]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return torch.randn(*shape, device="cuda").to(dtype)


def _leaf(t: Any) -> Any:
    return None if t is None else t.detach().clone().requires_grad_()


def _exact(t: Any) -> Any:
    return None if t is None else t.double().requires_grad_()


def _check(found: Any, exact: Any, dtype: torch.dtype, name: str) -> None:
    if found.numel():
        error = (found.double() - exact).norm() / exact.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype], (name, float(error))


def check_columns(overlap: Overlap, counts: list[int], dtype: torch.dtype) -> None:
    rank, rows = overlap.rank, sum(counts)
    start, width = sum(counts[:rank]), 16 * overlap.size
    mine, out = slice(start, start + counts[rank]), slice(16 * rank, 16 * rank + 16)
    X, dys = randn(rows, K, dtype=dtype, seed=rows), [randn(rows, width, dtype=dtype) for _ in range(3)]
    W = [randn(width, K, dtype=dtype) for _ in range(3)]
    B = [randn(width, dtype=dtype), None, randn(width, dtype=dtype)]
    xe, we, be = _exact(X), [_exact(w) for w in W], [_exact(b) for b in B]
    exact = [F.linear(xe, w, b) for w, b in zip(we, be, strict=True)]
    torch.autograd.backward(exact, [d.double() for d in dys])
    for function in (all_gather_gemm, replicated_gemm):
        part = slice(None) if function is replicated_gemm else mine
        x, ws = _leaf(X[part]), [_leaf(w[out]) for w in W]
        bs = [_leaf(None if b is None else b[out]) for b in B]
        options = {} if function is replicated_gemm else {"rows": counts}
        ys = function(x, ws, overlap, bias=bs, **options)
        torch.autograd.backward(ys, [d[:, out].contiguous() for d in dys])
        for y, e in zip(ys, exact, strict=True):
            _check(y, e[:, out], dtype, "y")
        _check(x.grad, xe.grad[part], dtype, "dx")
        for w, e in zip(ws, we, strict=True):
            _check(w.grad, e.grad[out], dtype, "dw")
        _check(bs[0].grad, be[0].grad[out], dtype, "db")


def check_rows(overlap: Overlap, counts: list[int], dtype: torch.dtype) -> None:
    rank, size, rows = overlap.rank, overlap.size, sum(counts)
    start = sum(counts[:rank])
    mine, depth = slice(start, start + counts[rank]), slice(K * rank, K * rank + K)
    X, W = randn(rows, K * size, dtype=dtype, seed=rows), randn(64, K * size, dtype=dtype)
    B, dy = randn(64, dtype=dtype), randn(rows, 64, dtype=dtype)
    xe, we, be = _exact(X), _exact(W), _exact(B)
    exact = F.linear(xe, we, be)
    exact.backward(dy.double())
    for function in (gemm_reduce_scatter, gemm_all_reduce):
        part = mine if function is gemm_reduce_scatter else slice(None)
        x, w, b = _leaf(X[:, depth]), _leaf(W[:, depth]), _leaf(B)
        w.main_grad = torch.ones_like(w, dtype=torch.float32)
        options: Any = {"rows": counts} if function is gemm_reduce_scatter else {}
        y = function(x, w, overlap, bias=b, **options)
        y.backward(dy[part])
        _check(y, exact[part], dtype, "y")
        _check(x.grad, xe.grad[:, depth], dtype, "dx")
        _check(w.main_grad - 1, we.grad[:, depth], dtype, "main_grad")
        _check(b.grad, be.grad, dtype, "db")


def functions(overlap: Overlap) -> dict[str, Any]:
    size = overlap.size
    some = [[64] * size, [30 + 7 * rank for rank in range(size)], [0, *[48] * (size - 1)], [512] * size]
    ways: tuple[Way, ...] = ("sequential", "chunked", "fused")
    for way in ways:
        force(overlap, way)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for counts in some:
                check_columns(overlap, counts, dtype)
                check_rows(overlap, counts, dtype)
    return {"transport": overlap.transport.name}


def _layer(overlap: Overlap, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = all_gather_gemm(x, up, overlap, layer="mlp.up")
    y: Tensor = gemm_reduce_scatter(z, down, overlap, layer="mlp.down")
    return y


def bitwise(overlap: Overlap) -> dict[str, Any]:
    """The same bits 100 times, with ranks late at random."""
    rng = random.Random(overlap.rank)
    x, up, down = randn(512, 512), randn(256, 512), randn(512, 256)
    wrong = 0
    for way in ("chunked", "fused"):
        force(overlap, way)
        first = _layer(overlap, x, up, down)
        for _ in range(100):
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.randrange(2_000_000))
            wrong += not torch.equal(_layer(overlap, x, up, down), first)
    return {"wrong": wrong}


def graphs(overlap: Overlap) -> dict[str, Any]:
    """1,000 replays with changing inputs, and eager calls between them. One call a graph: always in the same slot."""
    x, up, down = randn(256, 512), randn(128, 512), randn(512, 128)
    wrong = 0
    for way in ("chunked", "fused"):
        force(overlap, way)
        for _ in range(2):
            _layer(overlap, x, up, down)
        torch.cuda.synchronize()
        dist.barrier(overlap.group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = _layer(overlap, x, up, down)
        for i in range(1000):
            x.normal_()
            if i % 17 == overlap.rank:
                torch.cuda._sleep(200_000)
            graph.replay()
            if i % 50 == 0:
                found = z.clone()
                wrong += not torch.equal(found, _layer(overlap, x, up, down))
    return {"wrong": wrong}


def slow(overlap: Overlap) -> dict[str, Any]:
    """A rank that is late for longer than five seconds is waited for, and named."""
    x, up, down = randn(64, 512), randn(128, 512), randn(512, 128)
    force(overlap, "chunked")
    _layer(overlap, x, up, down)
    torch.cuda.synchronize()
    if overlap.rank == 1:
        time.sleep(8)
    y = _layer(overlap, x, up, down)
    torch.cuda.synchronize()
    return {"finite": bool(y.isfinite().all())}


def _until_timeout(overlap: Overlap, calls: int) -> dict[str, Any]:
    start = time.monotonic()
    x, up, down = randn(64, 512), randn(128, 512), randn(512, 128)
    y = torch.zeros(1, device="cuda")
    try:
        for _ in range(calls):
            y = _layer(overlap, x, up, down)
        torch.cuda.synchronize()
        stood = time.monotonic() - start
        poisoned = bool(y.isnan().all())
        _layer(overlap, x, up, down)
    except PeerTimeout as error:
        return {"said": str(error), "seconds": stood, "poisoned": poisoned}
    return {"said": "", "seconds": stood, "poisoned": poisoned}


def killed(overlap: Overlap) -> dict[str, Any]:
    """The last rank dies between two calls."""
    force(overlap, "chunked")
    _layer(overlap, randn(64, 512), randn(128, 512), randn(512, 128))
    torch.cuda.synchronize()
    dist.barrier(overlap.group)
    if overlap.rank == overlap.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _until_timeout(overlap, 3)


def skipped(overlap: Overlap) -> dict[str, Any]:
    """The last rank lives and makes no call: after the process group's time-out the others stop waiting."""
    force(overlap, "chunked")
    _layer(overlap, randn(64, 512), randn(128, 512), randn(512, 128))
    torch.cuda.synchronize()
    dist.barrier(overlap.group)
    if overlap.rank == overlap.size - 1:
        time.sleep(TIMEOUT + 15)
        return {"said": "slept"}
    return _until_timeout(overlap, 1)


def restarted(overlap: Overlap) -> dict[str, Any]:
    """The last rank dies in the first life of all; in the second the results are right."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return killed(overlap)
    x, up, down = randn(64, 512), randn(128, 512), randn(512, 128)
    y: dict[Way, Tensor] = {}
    ways: tuple[Way, ...] = ("sequential", "chunked", "fused")
    for way in ways:
        force(overlap, way)
        y[way] = _layer(overlap, x, up, down).float()
    error = max(float((y[way] - y["sequential"]).norm() / y["sequential"].norm()) for way in ways)
    return {"error": error, "transport": overlap.transport.name}


def main() -> None:
    what, out = sys.argv[1], Path(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://"))
    # gloo finds the addresses of ranks that were killed in the store that torchrun keeps (torch 2.11 to 2.13)
    store = dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    timeout = timedelta(seconds=TIMEOUT if what == "skipped" else 120)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group, strict=True)
    cases = [functions, bitwise, graphs, slow, killed, skipped, restarted]
    found = {case.__name__: case for case in cases}[what](overlap)
    (out / f"{overlap.rank}.json").write_text(json.dumps(found))
    if what in ("killed", "skipped") or "said" in found:
        time.sleep(15)  # not to be taken for a rank that died, by one that gives up a little later
        os._exit(0)  # the group cannot be left in order any more
    overlap.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
