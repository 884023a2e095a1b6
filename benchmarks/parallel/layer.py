"""`torchrun --nproc-per-node 4 -m benchmarks.parallel.layer`: one Llama-70B layer, tensor and sequence parallel, bf16.

Forward and backward of norm, qkv, causal attention, projection, norm, gate and up, down; one sequence of 8192 tokens.
In turns: collectives then products (NCCL, cuBLAS), torch's async-TP operators with a backward of their own, and ours.
`--tiny` runs a small one over gloo on the CPU, without async-TP, to see that the gradients agree.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel.overlap import shot
from powertrain.ops.activations import swiglu
from powertrain.ops.attention import attention
from powertrain.ops.norm import rms_norm
from powertrain.ops.rope import rope_qkv
from powertrain.ops.rope_table import rope_table
from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import Choice


def normed(x: Tensor, weight: Tensor) -> Tensor:
    y = rms_norm(x, weight)
    assert isinstance(y, Tensor)
    return y


Columns = Callable[[Tensor, Tensor], Tensor]


class Layer(torch.nn.Module):
    """This rank's part: column-parallel qkv and gate+up, row-parallel projections."""

    def __init__(self, size: int, hidden: int, heads: int, kv_heads: int, ffn: int, device: str) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.heads, self.kv_heads = heads // size, kv_heads // size
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            values = torch.randn(rows, columns, device=device) * columns**-0.5
            return torch.nn.Parameter(values.to(dtype))

        self.qkv = weight((self.heads + 2 * self.kv_heads) * self.head_dim, hidden)
        self.proj = weight(hidden, self.heads * self.head_dim)
        self.up, self.down = weight(2 * ffn // size, hidden), weight(hidden, ffn // size)
        self.norms = torch.nn.ParameterList([torch.ones(hidden, device=device, dtype=dtype) for _ in range(2)])

    def forward(self, x: Tensor, columns: Columns, rows: Columns, table: Any) -> Tensor:
        qkv = columns(normed(x, self.norms[0]), self.qkv)
        q, k, v = rope_qkv(qkv[None], table=table, num_heads=self.heads, num_kv_heads=self.kv_heads)
        mixed = attention(q, k, v, is_causal=True).reshape(len(qkv), -1)
        x = x + rows(mixed, self.proj)
        return x + rows(swiglu(columns(normed(x, self.norms[1]), self.up)), self.down)


class AsyncColumns(torch.autograd.Function):
    """torch's fused_all_gather_matmul; backward fuses dx with its reduce-scatter and gathers x beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        y: Tensor = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.T], 0, group.group_name, return_A=False)[1][0]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        whole = x.new_empty(len(dy), x.shape[1])
        gathered = dist.all_gather_into_tensor(whole, x, group=ctx.group, async_op=True)
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(dy.contiguous(), w, "sum", 0, ctx.group.group_name)
        assert gathered is not None
        gathered.wait()
        return dx, dy.T @ whole, None


class AsyncRows(torch.autograd.Function):
    """torch's fused_matmul_reduce_scatter; backward's gathering of dy serves dx and dw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), w.T, "sum", 0, group.group_name)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        whole, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(dy.contiguous(), [w], 0, ctx.group.group_name)
        return dx, whole.T @ x, None


def sequentially(overlap: Overlap, call: Callable[[], None]) -> None:
    """Every product after its collective."""
    planner, chosen = overlap.planner, overlap.planner._chosen
    planner.choices.clear()
    planner._chosen = lambda product: Choice("sequential", "forced")  # type: ignore[method-assign]
    call()
    planner._chosen = chosen  # type: ignore[method-assign]
    planner.choices.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    if not options.tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if options.tiny else "nccl")
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group)
    torch.manual_seed(overlap.rank)
    hidden, heads, kv_heads, ffn, tokens = (32, 8, 4, 64, 16) if options.tiny else (8192, 64, 8, 28672, 8192)
    layer = Layer(overlap.size, hidden, heads, kv_heads, ffn, device)
    x = torch.randn(tokens // overlap.size, hidden, device=device, dtype=layer.qkv.dtype).requires_grad_()
    dy = torch.randn_like(x)
    table = rope_table(hidden // heads, tokens, device=device)

    def step(columns: Columns, rows: Columns) -> None:
        for p in layer.parameters():
            p.grad = None
        x.grad = None
        layer(x, columns, rows, table).backward(dy)

    ours = partial(step, partial(all_gather_gemm, overlap=overlap), partial(gemm_reduce_scatter, overlap=overlap))
    variants: dict[str, Callable[[], None]] = {"sequential": partial(sequentially, overlap, ours), "ours": ours}
    if not options.tiny:
        columns = lambda a, w: AsyncColumns.apply(a, w, group)  # noqa: E731
        rows = lambda a, w: AsyncRows.apply(a, w, group)  # noqa: E731
        variants["torch async-TP"] = partial(step, columns, rows)
    grads: dict[str, list[Tensor]] = {}
    for name, call in variants.items():
        call()
        grads[name] = [p.grad.float() for p in (x, *layer.parameters()) if p.grad is not None]
    for name, found in grads.items():
        for a, b in zip(found, grads["sequential"], strict=True):
            assert (a - b).norm() / b.norm() < 2e-2, name
    if overlap.rank == 0:
        print("gradients agree", flush=True)
    if not options.tiny:
        _measure(variants, overlap, options.rounds)
    overlap.close()
    dist.destroy_process_group()


def _measure(variants: dict[str, Callable[[], None]], overlap: Overlap, rounds: int) -> None:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 2):
        for name, call in variants.items():
            samples[name].append(shot(call, overlap.group, 8.0))
    medians = torch.tensor([statistics.median(v[2:]) for v in samples.values()], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=overlap.group)
    if overlap.rank == 0:
        ms = dict(zip(variants, medians.tolist(), strict=True))
        for name, value in ms.items():
            faster = value / ms["ours"]
            print(f"Llama-70B layer, TP{overlap.size}, 8192 tokens: {name:16} {value:7.3f} ms, ours {faster:.3f}x")
        print(overlap.explain())


if __name__ == "__main__":
    main()
