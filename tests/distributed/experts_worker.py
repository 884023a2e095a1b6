"""`python -m tests.distributed.experts_worker OUT [killed]`, one rank: experts over gloo; `simulated`: by threads."""

import copy
import json
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from powertrain.nn.moe import MoE, Router
from powertrain.ops.activations import gated_activation
from powertrain.ops.fp8.dequantize import fp8_dequantize
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.moe import moe_permute, moe_route, moe_unpermute
from powertrain.parallel.experts import combine, dispatch, moe_experts
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.simulated import World
from powertrain.quant import Block, Row

H, INTERMEDIATE, TOP_K = 6, 5, 2


def tokens_of(size: int) -> list[list[int]]:
    """Even tokens, uneven ones, a rank that has none, and one that has all."""
    return [[7] * size, [2 + 3 * rank for rank in range(size)], [0, *[5] * (size - 1)], [*[0] * (size - 1), 9]]


def operands(tokens: int, num_experts: int, unused: int) -> dict[str, Tensor]:
    """The same on every rank; the first `unused` experts are never chosen."""
    g = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    logits = randn(tokens, num_experts)
    logits[:, :unused] = -50.0
    return {
        "x": randn(tokens, H), "logits": logits, "gate_up": randn(num_experts, 2 * INTERMEDIATE, H),
        "down": randn(num_experts, H, INTERMEDIATE), "dy": randn(tokens, H),
    }  # fmt: skip


def leaves(whole: dict[str, Tensor], tokens: slice, experts: slice) -> dict[str, Tensor]:
    parts = {name: whole[name][experts if name in ("gate_up", "down") else tokens] for name in whole}
    return {name: part.clone().requires_grad_(name != "dy") for name, part in parts.items()}


def mlp(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
    return grouped_gemm(gated_activation(grouped_gemm(rows, gate_up, offsets), "swiglu"), down, offsets)


def grads(operands: dict[str, Tensor], y: Tensor) -> list[Tensor]:
    """y and the gradients: of x, the router's logits (through the weights), and both weights."""
    wanted = [operands[name] for name in ("x", "logits", "gate_up", "down")]
    return [y.detach(), *torch.autograd.grad((y * operands["dy"]).sum(), wanted)]


def one_rank(whole: dict[str, Tensor], kept: Tensor | None = None) -> list[Tensor]:
    """All tokens and experts; kept [T, k]: which assignments are not dropped."""
    o = leaves(whole, slice(None), slice(None))
    weights, experts = moe_route(o["logits"], top_k=min(TOP_K, whole["logits"].shape[1]))
    rows, offsets, positions = moe_permute(o["x"], experts, o["gate_up"].shape[0])
    weights = weights.double() if kept is None else weights.double() * kept
    return grads(o, moe_unpermute(mlp(rows, o["gate_up"], o["down"], offsets), positions, weights))


def by_halves(o: dict[str, Tensor], weights: Tensor, experts: Tensor, overlap: Overlap, capacity: int | None) -> Tensor:
    found = dispatch(o["x"], experts, overlap.size * o["gate_up"].shape[0], overlap, capacity=capacity)
    return combine(mlp(found.rows, o["gate_up"], o["down"], found.offsets), found, weights, overlap)


WAYS = ("overlapped", "sequential", "auto", "halves")


def mine_of(overlap: Overlap, counts: list[int], num_experts: int) -> tuple[slice, slice]:
    start, each = sum(counts[: overlap.rank]), num_experts // overlap.size
    return slice(start, start + counts[overlap.rank]), slice(overlap.rank * each, (overlap.rank + 1) * each)


def spread(
    whole: dict[str, Tensor], overlap: Overlap, counts: list[int], way: str, capacity: int | None
) -> list[Tensor]:
    o = leaves(whole, *mine_of(overlap, counts, whole["gate_up"].shape[0]))
    weights, experts = moe_route(o["logits"], top_k=min(TOP_K, whole["logits"].shape[1]))
    if way == "halves":
        return grads(o, by_halves(o, weights.double(), experts, overlap, capacity))
    args = o["x"], weights.double(), experts, o["gate_up"], o["down"], overlap
    return grads(o, moe_experts(*args, capacity=capacity, way=way))  # type: ignore[arg-type]


def kept_within(whole: dict[str, Tensor], counts: list[int], size: int, capacity: int) -> Tensor:
    """[T, k]: the first `capacity` of each rank's assignments to each rank, experts' order, then tokens'."""
    _, experts = moe_route(whole["logits"], top_k=min(TOP_K, whole["logits"].shape[1]))
    each, kept, start = whole["gate_up"].shape[0] // size, torch.zeros(experts.shape, dtype=torch.bool), 0
    for count in counts:
        flat = experts[start : start + count].flatten()
        for target in range(size):
            chosen = [i for i in flat.argsort(stable=True).tolist() if flat[i] // each == target]
            kept[start : start + count].view(-1)[chosen[:capacity]] = True
        start += count
    return kept


def close(found: Tensor, expected: Tensor, terms: int, about: str = "") -> None:
    """Float32 where all else is float64: the router's weights and their gradients, `terms` of which are added, first
    over the experts of a softmax, then over tokens. A rank that has other tokens may round each otherwise."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    bound = terms * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=about.__add__)


def check(overlap: Overlap) -> None:
    for counts in tokens_of(overlap.size):
        # experts without tokens: one of a rank's, all of a rank's, none
        for per_rank, unused in ((2, 1), (1, 1), (3, 0)):
            # exact, room for all, and too little
            for capacity in (None, 2 * max(counts) + 1, 3):
                check_case(overlap, counts, per_rank, unused, capacity, WAYS)


def check_case(
    overlap: Overlap, counts: list[int], per_rank: int, unused: int, capacity: int | None, ways: tuple[str, ...]
) -> None:
    size = overlap.size
    whole = operands(sum(counts), size * per_rank, unused)
    expected = one_rank(whole, None if capacity is None else kept_within(whole, counts, size, capacity))
    tokens, experts = mine_of(overlap, counts, size * per_rank)
    for way in ways:
        found = spread(whole, overlap, counts, way, capacity)
        for name, f, e in zip(("y", "dx", "dlogits", "dgate_up", "ddown"), found, expected, strict=True):
            about = f"{name}, {way}, tokens {counts}, {per_rank} experts a rank, capacity {capacity}: "
            close(f, e[experts if e.dim() == 3 else tokens], size * per_rank + sum(counts), about)


WIRES: tuple[Row | Block, ...] = (Row(), Block(), Row(power_of_two=False))
WIDE = 130  # a whole group of 128 and a partial one; no whole 16 bytes


def check_wire(overlap: Overlap) -> None:
    """Rows sent in FP8 give the bits of rows sent as they are and rounded by their experts."""
    for wire in WIRES:
        by = "row" if isinstance(wire, Row) else "group"
        for counts, capacity, way in product(tokens_of(overlap.size)[1:3], (None, 4), ("overlapped", "sequential")):
            g = torch.Generator().manual_seed(overlap.rank + 1)
            T, each = counts[overlap.rank], 2
            scales = torch.exp2(torch.randint(-9, 9, (T, WIDE), generator=g).float())
            x = (torch.randn(T, WIDE, generator=g) * scales).bfloat16()
            gate_up, down = torch.randn(each, 4, WIDE, generator=g), torch.randn(each, WIDE, 2, generator=g)
            experts = torch.randint(0, each * overlap.size, (T, 2), generator=g, dtype=torch.int32)
            weights, dy = torch.rand(T, 2, generator=g), torch.randn(T, WIDE, generator=g).bfloat16()
            rounded = fp8_quantize(x, by, power_of_two=wire.power_of_two, columns=False).rows
            sent = fp8_dequantize(rounded, WIDE, torch.bfloat16)
            found = []
            for tokens, name in ((x, wire), (sent, None)):
                wanted = [t.bfloat16().detach().requires_grad_() for t in (tokens, gate_up, down)]
                y = moe_experts(
                    wanted[0], weights, experts, *wanted[1:], overlap, capacity=capacity, way=way, wire=name
                )
                found.append([y, *torch.autograd.grad(y, wanted, dy)])
            assert not torch.equal(x, sent) or not T
            about = f"{wire}, tokens {counts}, capacity {capacity}, {way}"
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), about


def check_layer(overlap: Overlap) -> None:
    """A layer whose experts are spread against the same one whole; its weights as DTensors."""
    torch.manual_seed(0)
    whole = MoE(Router(H, 2 * overlap.size, TOP_K), H, INTERMEDIATE, shared_size=4).double()
    for p in whole.parameters():
        torch.nn.init.normal_(p)
    layer = copy.deepcopy(whole)
    layer.experts.shard(init_device_mesh("cpu", (overlap.size,), mesh_dim_names=("expert",)))
    x = torch.randn(overlap.size, 7, H, dtype=torch.float64)
    y, found = whole(x), layer(x[overlap.rank])
    terms = 2 * overlap.size + 7 * overlap.size  # experts, tokens
    close(found, y[overlap.rank], terms)
    (y.square().sum() + found.square().sum()).backward()
    for name in ("gate_up", "down"):
        weight, spread = getattr(whole.experts, name), getattr(layer.experts, name)
        torch.testing.assert_close(spread.full_tensor(), weight)
        close(spread.grad.full_tensor(), weight.grad, terms)
    assert layer.experts.overlap is not None
    layer.experts.overlap.close()


def simulated(size: int, seed: int, delay: float = 0.0) -> list[Any]:
    """y and gradients of every rank, by threads, overlapped."""
    counts = tokens_of(size)[1]
    whole = operands(sum(counts), 2 * size, 1)

    def one(overlap: Overlap) -> list[Tensor]:
        return [t for capacity in (None, 4) for t in spread(whole, overlap, counts, "overlapped", capacity)]

    return World(size, seed=seed, delay=delay).run(one)


def killed(overlap: Overlap) -> str:
    """Rank 1 dies between forward and backward; what the others are told."""
    whole = operands(4 * overlap.size, 2 * overlap.size, 0)
    o = leaves(whole, *mine_of(overlap, [4] * overlap.size, 2 * overlap.size))
    weights, experts = moe_route(o["logits"], top_k=TOP_K)
    y = moe_experts(o["x"], weights.double(), experts, o["gate_up"], o["down"], overlap, way="overlapped")
    if overlap.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    try:
        y.sum().backward()
    except PeerTimeout as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    if sys.argv[2:] == ["killed"]:
        (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(killed(Overlap(group))))
        os._exit(0)  # the group cannot be left in order any more
    for name in ("auto", "sequential"):
        overlap = Overlap(group, transport=name, debug=name == "auto")
        even, uneven, first_none, last_all = tokens_of(overlap.size)
        ways = ("overlapped", "sequential") if name == "auto" else ("auto",)
        for counts, per_rank, unused, capacity in (
            (even, 1, 1, None), (uneven, 2, 1, None), (first_none, 3, 0, 3), (last_all, 2, 2, None)
        ):  # fmt: skip
            check_case(overlap, counts, per_rank, unused, capacity, ways)
        overlap.close()
    check_layer(overlap)
    overlap = Overlap(group)
    check_wire(overlap)
    overlap.close()
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps("done"))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends while they let go of tensors


if __name__ == "__main__":
    main()
