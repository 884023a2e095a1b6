"""Error against float64: at most twice plain PyTorch's in the same dtype, plus one rounding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Error:
    """The largest errors of one result against float64, and the allowed ones."""

    name: str
    ours: float
    plain: float  # plain PyTorch in the same dtype
    allowed: float  # 2 * plain + one rounding at the result's scale, + the case's slack, + more for a single number

    @property
    def ok(self) -> bool:
        # NaN is never ok
        return self.ours <= self.allowed


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _leaf(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    detached = tensor.detach()
    # keep strides: a non-contiguous input must stay one
    copy = detached.to(dtype) if dtype else torch.empty_strided(
        detached.shape, detached.stride(), dtype=detached.dtype, device=detached.device
    ).copy_(detached) if _dense(detached) else detached.clone()  # fmt: skip
    return copy.requires_grad_(tensor.requires_grad)


def _dense(tensor: Tensor) -> bool:
    return all(stride > 0 for stride in tensor.stride())


def evaluate(
    function: Callable[..., Any],
    tensors: Tensors,
    grads: tuple[Tensor, ...] | None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Results of `function(**tensors)` and the gradient of every input that requires one."""
    leaves = {name: _leaf(tensor, dtype) for name, tensor in tensors.items()}
    outputs = _as_tuple(function(**leaves))
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    if grads is None or not wanted:
        return outputs, {}
    pairs = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    results = torch.autograd.grad(
        [out for out, _ in pairs], list(wanted.values()), [grad for _, grad in pairs], allow_unused=True
    )
    return outputs, {f"d{name}": grad for name, grad in zip(wanted, results, strict=True) if grad is not None}


def _error(name: str, ours: Tensor, plain: Tensor, exact: Tensor, slack: int, inputs: float = 0.0) -> Error:
    """inputs: largest eps of the inputs' dtypes."""
    # an empty result has no error, and another shape would be broadcast
    shapes = [list(t.shape) for t in (ours, plain, exact)]
    assert shapes[0] == shapes[1] == shapes[2], f"{name} has shape {shapes[0]}, expected {shapes[1]}, {shapes[2]}"
    if not ours.numel():
        return Error(name, 0.0, 0.0, 0.0)
    exact = exact.double()
    scale = exact.abs().max().item()
    worst = [(t.double() - exact).abs().max().item() for t in (ours, plain)]
    rounding = torch.finfo(ours.dtype).eps + slack * torch.finfo(torch.float32).eps
    if ours.numel() == 1:
        # Plain's error of one number can be small by luck: roundings of the terms of a sum cancel. On an H200 twelve of
        # forty draws of a bf16 loss broke the bound though both errors had the same mean, 1e-4 of the loss.
        rounding += inputs / 16
    return Error(name, worst[0], worst[1], 2 * worst[1] + rounding * scale)


def errors(
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Tensors,
    *,
    backward: bool = True,
    seed: int = 1234,  # not that of the inputs: gradients that equal them flatter
    slack: int = 0,  # roundings of float32 that another order of computation costs; 16 bits do not notice them
) -> list[Error]:
    """Errors of every output and of every gradient (inputs that require one), in the order of both.

    `ours` and `plain` see the tensors as they are, `reference` sees float64 copies. All three take the tensors by
    name and return a tensor or a tuple; the same random output gradients go into all.
    """
    with torch.no_grad():
        shapes = _as_tuple(ours(**{name: _leaf(tensor) for name, tensor in tensors.items()}))
    generator = torch.Generator(shapes[0].device).manual_seed(seed)
    grads = tuple(
        torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
        for out in shapes
    )
    exact, exact_grads = evaluate(reference, tensors, grads if backward else None, torch.float64)
    rough, rough_grads = evaluate(plain, tensors, grads if backward else None)
    results, our_grads = evaluate(ours, tensors, grads if backward else None)
    assert our_grads.keys() == exact_grads.keys(), f"gradients of {sorted(our_grads)}, expected {sorted(exact_grads)}"
    inputs = max(
        (torch.finfo(t.dtype).eps for t in tensors.values() if t is not None and t.is_floating_point()), default=0
    )
    worst = [
        _error(f"out{i}", *triple, slack, inputs) for i, triple in enumerate(zip(results, rough, exact, strict=True))
    ]
    for name, grad in our_grads.items():
        source = tensors[name.removeprefix("d")]
        assert source is not None and grad.dtype == source.dtype, f"{name} has dtype {grad.dtype}"
        worst.append(_error(name, grad, rough_grads[name], exact_grads[name], slack))
    return worst


def check(
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Tensors,
    *,
    backward: bool = True,
    slack: int = 0,
) -> None:
    """Fail unless every result and gradient of `ours` is within the judge's bound."""
    bad = [e for e in errors(ours, plain, reference, tensors, backward=backward, slack=slack) if not e.ok]
    lines = [f"{e.name}: error {e.ours:.3g}, allowed {e.allowed:.3g} (plain PyTorch {e.plain:.3g})" for e in bad]
    assert not bad, "; ".join(lines)
