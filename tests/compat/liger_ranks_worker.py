"""`python -m tests.compat.liger_ranks_worker OUT`, one rank: Liger's functions over ranks, over gloo, in float64."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp
from powertrain.compat.liger_kernel.transformers.moe import LigerExpertParallelFusedMoe

# no multiple of a tile, and more tokens than words
M, H, WORDS, EXPERTS, WIDTH = 13, 6, 5, 2, 4
TEMPERATURE = 0.7


def made(*shape: int, seed: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def check_loss(group: ProcessGroup | None, rank: int, size: int) -> None:
    """Losses, entropies and gradients are those of the whole vocabulary in plain PyTorch."""
    x, weight, dy = made(M, H, seed=0), made(WORDS * size, H, seed=1), made(2, M, seed=2)
    target = torch.arange(M) * 3 % (WORDS * size)
    target[4] = -7
    whole = [t.clone().requires_grad_() for t in (x, weight)]
    log_p = F.log_softmax(whole[0] @ whole[1].T / TEMPERATURE, -1)
    kept = target != -7
    losses = torch.where(kept, -log_p.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    entropies = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0.0)
    mine = [x.clone().requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()]
    call = liger_fused_linear_scaled_cross_entropy_tp
    found = call(mine[0], mine[1], target, group, TEMPERATURE, -7, tiles_per_reduce=2, return_entropy=True)
    compare([*found], [losses, entropies])
    for weights in ([dy[0], dy[1]], [dy[0], 0 * dy[1]]):
        expected = torch.autograd.grad((losses * weights[0] + entropies * weights[1]).sum(), whole, retain_graph=True)
        grads = torch.autograd.grad(found[0] @ weights[0] + found[1] @ weights[1], mine, retain_graph=True)
        compare([*grads], [expected[0], expected[1].chunk(size)[rank]])
    alone = call(mine[0], mine[1], target, group, TEMPERATURE, -7)
    assert isinstance(alone, Tensor) and torch.equal(alone, found[0]) and not torch.signbit(alone[4])


def check_experts(group: ProcessGroup | None, rank: int, size: int) -> None:
    """Each rank's tokens through all experts; the weights' gradients are sums over the ranks' tokens."""
    experts, k = EXPERTS * size, 2
    x, dy = made(size, 3, M, H, seed=3), made(size, 3, M, H, seed=4)
    chosen = made(size, 3, M, experts, seed=5).topk(k).indices
    routed = made(size, 3, M, k, seed=6)
    weights = [made(experts, WIDTH, H, seed=7), made(experts, WIDTH, H, seed=8), made(experts, H, WIDTH, seed=9)]
    whole = [t.clone().requires_grad_() for t in (x, routed, *weights)]
    gate, up, down = (t[chosen] for t in whole[2:])
    hidden = F.silu(torch.einsum("rbmkih,rbmh->rbmki", gate, whole[0])) * torch.einsum(
        "rbmkih,rbmh->rbmki", up, whole[0]
    )
    y = (torch.einsum("rbmkhi,rbmki->rbmkh", down, hidden) * whole[1][..., None]).sum(-2)
    expected = torch.autograd.grad((y * dy).sum(), whole)
    mine = [t.clone().requires_grad_() for t in (x[rank], routed[rank], *(w.chunk(size)[rank] for w in weights))]
    found = LigerExpertParallelFusedMoe(group)(mine[0], chosen[rank].short(), *mine[1:], experts)
    grads = torch.autograd.grad((found * dy[rank]).sum(), mine)
    shares = [expected[0][rank], expected[1][rank], *(g.chunk(size)[rank] for g in expected[2:])]
    compare([found, *grads], [y[rank], *shares])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for group in (None, dist.new_group([*range(dist.get_world_size())])):
        check_loss(group, dist.get_rank(), dist.get_world_size())
        check_experts(group, dist.get_rank(), dist.get_world_size())
    folder.joinpath(f"{dist.get_rank()}.done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
