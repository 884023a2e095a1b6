"""A candidate beside the module that it would replace, on random inputs and weights: outputs and gradients.

The bound is the one that every op of this package is tested by: at most twice the old module's error against float64,
plus one rounding.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from powertrain.testing import numerics

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# roundings of float32 that sums in another order may cost. Without them 2 of 160 attentions of random sizes were said
# to compute another function, by 1.2e-6 where 1.2e-6 was allowed
SLACK = 4
_NEAR = 0.1  # relative: a candidate further off computes another function, and is not judged by its gradients


def copy_with(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy without hooks whose parameters and buffers are make(the module's)."""
    # a deep copy would copy hooks with closures over the whole model
    memo: dict[int, Any] = {}
    for part in module.modules():
        memo |= {id(hooks): OrderedDict() for hooks in (getattr(part, name) for name in _HOOKS)}
    for tensor in [*module.parameters(), *module.buffers()]:
        # memo: deepcopy takes these tensors instead of copying the model's
        memo[id(tensor)] = make(tensor)
    return copy.deepcopy(module, memo)


class Twin:
    """A module of the same shape with random weights, apart from the model: no parameter of that is touched or read.

    So a module whose weights are sharded or on the meta device can be judged too, and fresh weights, which are often
    all 1 or all 0, hide no difference.
    """

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        self.device = generator.device

        def random(tensor: Tensor) -> Tensor:
            # integer buffers (position ids, masks) have meaning, random ones none
            if not tensor.is_floating_point():
                return tensor.detach().clone()
            values = torch.randn(tensor.shape, generator=generator, device=self.device)
            # vectors near 1, so that a norm's weight of 1 + w is told from w; matrices scaled as at initialization
            values = 1 + 0.2 * values if tensor.ndim < 2 else values / tensor.shape[-1] ** 0.5
            return (
                nn.Parameter(values.to(tensor.dtype)) if isinstance(tensor, nn.Parameter) else values.to(tensor.dtype)
            )

        self.module = copy_with(module, random).train()  # a dropout must show itself
        self.parameters = {name: p.detach().requires_grad_() for name, p in self.module.named_parameters()}

    def run(self, forward: Callable[..., Any] | None, **tensors: Tensor) -> Any:
        """The module's own forward, or `forward(module, x)`, with the parameters given by name (dots as __)."""
        x = tensors.pop("x")
        parameters = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        # float64 parameters come with buffers of float64: copies, so that the twin stays as it is
        buffers = {name: b.to(x.dtype) if b.is_floating_point() else b for name, b in self.module.named_buffers()}
        if forward is None:
            # functional_call: gradients with respect to weights without touching the module
            return functional_call(self.module, {**parameters, **buffers}, (x,))
        return functional_call(_Calling(self.module, forward), _prefixed({**parameters, **buffers}), (x,))


class _Calling(nn.Module):
    """Calls another forward of a module, so that functional_call can give it parameters."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, forward

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def first_equal(
    module: nn.Module, width: int, candidates: Sequence[tuple[str, Callable[..., Any]]]
) -> tuple[int | None, str]:
    """The candidate that computes what `module` does for inputs [.., width], nearest to its bits; or None, and why.

    candidates  (name, forward(module, x))
    """
    dtype, device = _of(module)
    generator = torch.Generator(device).manual_seed(0)
    # whatever the module raises becomes the reason in the report
    try:
        twin = Twin(module, generator)
        x = torch.randn((2, 5, width), generator=generator, device=device).to(dtype).requires_grad_()
        near = _near(twin, x, candidates)
    except Exception as error:  # the module's own: it takes other inputs than one tensor
        return None, f"it does not run on one tensor [..., {width}]: {_line(error)}"
    reason = "it computes another function than ours"
    # the nearest in bfloat16 first: casting orders differ there and are equal in float32
    for index in near:
        bad = _errors(twin, x, candidates[index][1])
        if not bad:
            return index, ""
        reason = f"{candidates[index][0]} differs: {bad}"
    return None, reason


def _near(twin: Twin, x: Tensor, candidates: Sequence[tuple[str, Callable[..., Any]]]) -> list[int]:
    """Candidates whose result is near the module's, the nearest first.

    In bfloat16 whatever the module's dtype is: there the order of casts and products shows, and a model may be cast
    after it was patched.
    """
    tensors = {name: t.bfloat16() for name, t in {"x": x, **_named(twin)}.items()}
    with torch.no_grad():
        old = twin.run(None, **tensors)
        if not isinstance(old, Tensor):
            raise TypeError(f"it returns a {type(old).__name__}, not a tensor")
        found = []
        for index, (_, forward) in enumerate(candidates):
            try:
                new = twin.run(forward, **tensors)
            except (ValueError, RuntimeError, TypeError):  # shapes that do not fit this candidate
                continue
            if new.shape == old.shape and new.dtype == old.dtype:
                distance = (new.double() - old.double()).norm() / old.double().norm().clamp_min(1e-30)
                found.append((float(distance), index))
    # far ones compute another function; judging their gradients would only take time
    return [index for distance, index in sorted(found) if distance < _NEAR]


def _errors(twin: Twin, x: Tensor, forward: Callable[..., Any]) -> str:
    """Which results are beyond the bound; empty: none. In float32 too, where a factor of 1.01 is no rounding."""
    bad = []
    for dtype in dict.fromkeys((torch.float32, x.dtype)):
        tensors = {name: t.detach().to(dtype).requires_grad_() for name, t in {"x": x, **_named(twin)}.items()}
        found = numerics.errors(
            lambda **t: twin.run(forward, **t),
            lambda **t: twin.run(None, **t),
            lambda **t: twin.run(None, **t),
            tensors,
            slack=SLACK,
        )
        bad += [f"{e.name.replace('__', '.')} by {e.ours:.2g}, allowed {e.allowed:.2g}" for e in found if not e.ok]
    return "; ".join(bad[:2])


def _named(twin: Twin) -> dict[str, Tensor]:
    return {name.replace(".", "__"): tensor for name, tensor in twin.parameters.items()}


def _of(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    first = next(module.parameters())
    device = first.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return first.dtype, device


def _line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:100]}"


def key(module: nn.Module) -> tuple[Any, ...]:
    """Modules of one key compute the same function: class, shapes, dtypes, device, and numbers among the attributes."""
    tensors = [(n, tuple(t.shape), t.dtype, t.device) for n, t in [*module.named_parameters(), *module.named_buffers()]]
    scalars = [
        (name, value)
        for part in module.modules()
        for name, value in sorted(vars(part).items())
        # layer_idx differs in every layer and changes nothing in a norm or MLP
        if isinstance(value, bool | int | float | str) and name not in ("layer_idx", "training")
    ]
    return type(module), tuple(tensors), tuple(map(type, module.modules())), tuple(scalars)
