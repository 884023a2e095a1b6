"""`python -m tests.distributed.overlap_worker WHAT OUT`, one rank: powertrain.parallel's functions over gloo."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from powertrain.parallel.collective_matmul import (
    _all_gather_op,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
    replicated_gemm,
)
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import CollectiveMismatch, PeerTimeout
from powertrain.parallel.transport.simulated import World

K, N = 6, 12  # features in and out of a whole column-parallel weight


def counts_of(size: int) -> list[list[int]]:
    """Even rows, uneven ones, and a rank that has none."""
    return [[5] * size, [3 + 2 * rank for rank in range(size)], [0, *[4] * (size - 1)]]


def _leaf(t: Any) -> Any:
    return None if t is None else t.detach().clone().requires_grad_()


def _close(found: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert found is not None and expected is not None, name
    torch.testing.assert_close(found, expected, msg=lambda m: f"{name}: {m}")


def check_columns(overlap: Overlap, counts: list[int], whole: dict[str, Any]) -> None:
    """all_gather_gemm and replicated_gemm, three weights that share a gathering, against one rank."""
    rank, size = overlap.rank, overlap.size
    start = sum(counts[:rank])
    mine, out = slice(start, start + counts[rank]), slice(rank * N // size, (rank + 1) * N // size)
    x, weights, biases = _leaf(whole["x"]), [_leaf(w) for w in whole["weights"]], [_leaf(b) for b in whole["biases"]]
    ys = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    sum((y * d).sum() for y, d in zip(ys, whole["dys"], strict=True)).backward()
    for function in (all_gather_gemm, replicated_gemm):
        spread = function is all_gather_gemm
        part = _leaf(whole["x"][mine] if spread else whole["x"])
        ws = [_leaf(w[out]) for w in whole["weights"]]
        bs = [_leaf(None if b is None else b[out]) for b in whole["biases"]]
        options: dict[str, Any] = {"rows": counts} if spread else {}
        found = function(part, ws, overlap, bias=bs, **options)
        for y, expected in zip(found, ys, strict=True):
            _close(y, expected[:, out].detach(), "y")
        sum((y * d[:, out]).sum() for y, d in zip(found, whole["dys"], strict=True)).backward()
        _close(part.grad, x.grad[mine] if spread else x.grad, "dx")
        for w, expected in zip(ws, weights, strict=True):
            _close(w.grad, expected.grad[out], "dw")
        _close(bs[0].grad, biases[0].grad[out], "db")


def check_rows(overlap: Overlap, counts: list[int], whole: dict[str, Any]) -> None:
    """gemm_reduce_scatter and gemm_all_reduce, a bias and a main_grad, against one rank."""
    rank, size = overlap.rank, overlap.size
    start = sum(counts[:rank])
    mine, depth = slice(start, start + counts[rank]), slice(rank * N // size, (rank + 1) * N // size)
    x, w, b = _leaf(whole["h"]), _leaf(whole["down"]), _leaf(whole["bias"])
    expected = F.linear(x, w, b)
    (expected * whole["dy"]).sum().backward()
    for function in (gemm_reduce_scatter, gemm_all_reduce):
        spread = function is gemm_reduce_scatter
        part, weight, bias = _leaf(whole["h"][:, depth]), _leaf(whole["down"][:, depth]), _leaf(whole["bias"])
        assert part is not None and weight is not None
        weight.main_grad = torch.ones_like(weight)
        options: dict[str, Any] = {"rows": counts} if spread else {}
        y = function(part, weight, overlap, bias=bias, **options)
        _close(y, (expected[mine] if spread else expected).detach(), "y")
        (y * (whole["dy"][mine] if spread else whole["dy"])).sum().backward()
        _close(part.grad, x.grad[:, depth], "dx")
        assert weight.grad is None
        _close(weight.main_grad - 1, w.grad[:, depth], "main_grad")
        _close(bias.grad, b.grad, "db")


def whole_operands(rows: int) -> dict[str, Any]:
    """The same on every rank."""
    g = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    return {
        "x": randn(rows, K), "weights": [randn(N, K) for _ in range(3)], "biases": [randn(N), None, randn(N)],
        "dys": [randn(rows, N) for _ in range(3)], "h": randn(rows, N), "down": randn(K, N), "bias": randn(K),
        "dy": randn(rows, K),
    }  # fmt: skip


def check(overlap: Overlap) -> None:
    for counts in counts_of(overlap.size):
        whole = whole_operands(sum(counts))
        check_columns(overlap, counts, whole)
        check_rows(overlap, counts, whole)


def check_collectives_alone(overlap: Overlap) -> None:
    """Asked for in sequence nothing is sent but by collectives, in backward too."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a transport in sequence sent something itself")

    overlap.transport.exchange = refuse  # type: ignore[attr-defined]
    counts = [5] * overlap.size
    check_columns(overlap, counts, whole_operands(sum(counts)))
    check_rows(overlap, counts, whole_operands(sum(counts)))


def refused(group: dist.ProcessGroup, **options: Any) -> None:
    """A group that has an overlap is not said to have another one."""
    [name] = options
    try:
        Overlap(group, **options)
    except ValueError as error:
        assert f"Overlap: {name} must be" in str(error) and "close() it first" in str(error), error
    else:
        raise AssertionError(f"Overlap(group, {options}) gave another overlap than was asked for")


def functions() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    for name in ("auto", "sequential"):
        overlap = Overlap(group, transport=name)
        assert Overlap(group) is overlap
        refused(group, transport="pipelined" if name == "sequential" else "sequential")
        refused(group, strict=True)
        refused(group, debug=True)
        check(overlap)
        if name == "sequential":
            check_collectives_alone(overlap)
        assert overlap.exchange_rows(overlap.rank + 3) == [rank + 3 for rank in range(overlap.size)]
        overlap.close()
    return {"transport": overlap.transport.name}


def compiled() -> dict[str, Any]:
    """torch.compile(fullgraph=True) and activation checkpointing, the same bits as without."""
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group)
    whole = whole_operands(5 * overlap.size)
    mine = slice(5 * overlap.rank, 5 * overlap.rank + 5)
    out = slice(overlap.rank * N // overlap.size, (overlap.rank + 1) * N // overlap.size)

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gemm_reduce_scatter(all_gather_gemm(x, up, overlap).tanh(), down, overlap)

    def broken(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gemm_reduce_scatter(compiled_part(x, up).tanh(), down, overlap)

    @torch.compile(backend="aot_eager")
    def compiled_part(x: Tensor, up: Tensor) -> Tensor:
        found = _all_gather_op(x, up, *[None] * 5, [5] * overlap.size, overlap.key)
        torch._dynamo.graph_break()
        return found[0]

    def checkpointed(*args: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)
        return found

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), checkpointed, broken):
        args = [_leaf(whole["x"][mine]), _leaf(whole["weights"][0][out]), _leaf(whole["down"][:, out])]
        y = function(*args)
        y.square().sum().backward()
        results.append([y.detach(), *(a.grad for a in args)])
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            _close(found, expected, "compiled or checkpointed")

    args = [_leaf(whole["x"][mine]), _leaf(whole["weights"][0][out]), _leaf(whole["down"][:, out])]
    args[1].main_grad = torch.zeros_like(args[1])
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*args).square().sum().backward()
    _close(args[1].grad, results[0][2], "dw, compiled, of a weight that has a main_grad")
    assert not args[1].main_grad.any()
    return {}


def mismatch() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group, debug=True)
    try:
        all_gather_gemm(torch.zeros(4, 8), torch.zeros(2, 8, requires_grad=overlap.rank == 0), overlap)
        raise AssertionError("ranks whose backward would differ were not told")
    except CollectiveMismatch as error:
        assert str(error).count("with gradient") == 1, error
    x, w = torch.zeros(4, 8 if overlap.rank else 6), torch.zeros(2, 8 if overlap.rank else 6)
    try:
        all_gather_gemm(x, w, overlap)
    except CollectiveMismatch as error:
        return {"said": str(error)}
    return {"said": ""}


def reopened() -> dict[str, Any]:
    """Rank 0 gives up; both close their overlap and make another."""
    group = dist.group.WORLD
    assert group is not None
    said = []
    for gives_up in (True, False):
        peers = Overlap(group).transport.peers  # type: ignore[attr-defined]
        if gives_up and peers.rank == 0:
            peers.broadcast_failure("rows did not come")
        dist.barrier()
        said.append(peers.reported_failure())
        dist.barrier()
        Overlap(group).close()
    return {"said": said}


def killed() -> dict[str, Any]:
    """Rank 1 dies between two calls; the others are told."""
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group)
    x, w = torch.zeros(4, 8), torch.zeros(2, 8)
    all_gather_gemm(x, w, overlap)
    if overlap.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            x, w = torch.zeros(4 * overlap.size, 8), torch.zeros(16, 8)
            gemm_reduce_scatter(x, w, overlap, layer="layers.3.mlp.down")
    except PeerTimeout as error:
        return {"said": str(error), "seconds": time.monotonic() - start}
    return {"said": "", "seconds": time.monotonic() - start}


def main() -> None:
    what, out = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {
        "functions": functions,
        "compiled": compiled,
        "mismatch": mismatch,
        "reopened": reopened,
        "killed": killed,
    }[what]()
    (out / f"{rank}.json").write_text(json.dumps(found))
    if what != "killed":  # then the group cannot be left in order any more
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends while they let go of tensors


def simulated(size: int, seed: int) -> None:
    """The same checks by threads, with delays."""
    World(size, seed=seed, delay=1e-3).run(check)


if __name__ == "__main__":
    main()
