"""Checks of ranks (check_ranks.py): our kernels, and optimizers, on DTensors, against plain tensors.

Under POWERTRAIN_INTERPRET=1, so that CPU tensors take the ops as a GPU's do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from powertrain.compat.layerwise_optimizers import FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad
from powertrain.nn.norm import RMSNorm
from powertrain.nn.tensor_parallel.linear import replicate
from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.cross_entropy import cross_entropy
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.rope import rope, rope_qkv
from powertrain.ops.rope_table import rope_table
from powertrain.ops.softmax import scaled_softmax

CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}
B, S, D, H = 4, 6, 16, 4


def check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS[function.__name__] = function
    return function


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


def agrees(mesh: DeviceMesh, op: Callable[..., Any], *inputs: tuple[Tensor, Any], stays: bool = True) -> None:
    """op(DTensors) as op(tensors), gradients included; results spread as the first argument is, if it `stays`."""
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x, _ in inputs]
    spread = [
        distribute_tensor(x.clone(), mesh, [placement]).requires_grad_(x.is_floating_point()) for x, placement in inputs
    ]
    expected, found = op(*plain), op(*spread)
    if isinstance(expected, Tensor):
        expected, found = (expected,), (found,)
    for one, other in zip(expected, found, strict=True):
        assert isinstance(other, DTensor)
        assert not stays or other.placements == (inputs[0][1],), other.placements
        torch.testing.assert_close(other.full_tensor(), one)
    weights = [randn(*one.shape) for one in expected]
    sum((one * w).sum() for one, w in zip(expected, weights, strict=True)).backward()  # type: ignore[union-attr]
    gradients = [distribute_tensor(w, mesh, [Replicate()]) for w in weights]
    sum((one * w).sum() for one, w in zip(found, gradients, strict=True)).backward()  # type: ignore[union-attr]
    for x, y in zip(plain, spread, strict=True):
        if x.grad is not None:
            assert isinstance(y.grad, DTensor)
            torch.testing.assert_close(y.grad.full_tensor(), x.grad, rtol=1e-4, atol=1e-5)


@check
def norms(mesh: DeviceMesh) -> None:
    x, weight, bias = randn(B, S, D), randn(D), randn(D) + 1.0
    for dim in (0, 1):
        agrees(mesh, rms_norm, (x, Shard(dim)), (weight, Replicate()))
        agrees(mesh, layer_norm, (x, Shard(dim)), (weight, Replicate()), (bias, Replicate()))
        agrees(
            mesh, lambda x, r, w: rms_norm(x, w, residual=r), (x, Shard(dim)), (x.flip(0), Shard(dim)),
            (weight, Replicate()),
        )  # fmt: skip
    agrees(mesh, rms_norm, (x, Shard(2)), (weight, Replicate()), stays=False)


@check
def norm_modules(mesh: DeviceMesh) -> None:
    norm = RMSNorm(D)
    replicate(norm, mesh)
    y = norm(distribute_tensor(randn(B, S, D), mesh, [Shard(1)]))
    assert isinstance(y, DTensor) and y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), rms_norm(randn(B, S, D), eps=norm.eps))


@check
def activations(mesh: DeviceMesh) -> None:
    x, bias = randn(B, S, D), randn(D)
    for dim in (0, 1, 2):
        agrees(mesh, lambda x: activation(x, "gelu"), (x, Shard(dim)))
        agrees(mesh, lambda x, up: gated_activation(x, "swiglu", up=up), (x, Shard(dim)), (x.flip(0), Shard(dim)))
    agrees(mesh, lambda x, b: activation(x, "silu", b), (x, Shard(1)), (bias, Replicate()))
    agrees(mesh, lambda x: gated_activation(x, "geglu"), (x, Shard(1)))
    agrees(mesh, lambda x: gated_activation(x, "geglu"), (x, Shard(2)), stays=False)


@check
def bias_and_dropout(mesh: DeviceMesh) -> None:
    x, bias, seed = randn(B, S, D), randn(D), torch.tensor([3, 4])
    agrees(
        mesh, lambda x, r, b: bias_dropout_add(x, b, r, 0.0), (x, Shard(1)), (x.flip(0), Shard(1)), (bias, Replicate())
    )
    agrees(
        mesh, lambda x, r: bias_dropout_add(x, None, r, 0.5, seed=seed), (x, Shard(1)), (x.flip(0), Shard(1)),
        stays=False,
    )  # fmt: skip


@check
def rotary(mesh: DeviceMesh) -> None:
    table = rope_table(D, S)
    q, k = randn(B, S, H, D), randn(B, S, H, D).flip(0)
    for dim in (0, 2):
        agrees(mesh, lambda q, k: rope(q, k, table=table), (q, Shard(dim)), (k, Shard(dim)))
    agrees(mesh, lambda q: rope_qkv(q, table=table, num_heads=2, num_kv_heads=1), (q, Shard(0)))


@check
def softmax(mesh: DeviceMesh) -> None:
    x = randn(B, H, S, S)
    # the last query has no key
    after = torch.ones(S, S).tril().bool()
    for dim in (0, 1):
        agrees(mesh, lambda x: scaled_softmax(x, scale=0.5, is_causal=True), (x, Shard(dim)))
        agrees(mesh, lambda x: scaled_softmax(x, mask=after, fully_masked="uniform"), (x, Shard(dim)))


@check
def losses(mesh: DeviceMesh) -> None:
    logits, target = randn(B * S, D), torch.arange(B * S) % D
    target[3] = -100
    for reduction in ("none", "sum", "mean"):
        agrees(
            mesh, lambda x, t, reduction=reduction: cross_entropy(x, t, reduction=reduction), (logits, Shard(0)),
            (target, Shard(0)), stays=reduction == "none",
        )  # fmt: skip


@check
def optimizers_by_layer(mesh: DeviceMesh) -> None:
    """Their steps read norms of whole tensors, of which a rank has a part: five rows are three and two."""
    for make in (FusedLAMB, FusedNovoGrad, partial(FusedNovoGrad, norm_type=0), FusedMixedPrecisionLamb):
        plain = [torch.nn.Parameter(randn(5, 3)), torch.nn.Parameter(randn(7))]
        spread = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
        optimizers = [make(parameters, lr=0.1) for parameters in (plain, spread)]
        for _ in range(2):
            for p, q in zip(plain, spread, strict=True):
                p.grad = p.detach().sin()
                q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(plain, spread, strict=True):
            assert isinstance(q, DTensor)
            torch.testing.assert_close(q.full_tensor(), p)
