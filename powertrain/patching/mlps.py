"""Feed-forward layers of any class: two linear layers and an activation, or three of them, gated.

    separate   down(act(gate(x)) * up(x))           Llama, Mistral, Qwen, Gemma
    packed     down(act(a) * b), a, b = in(x)       Phi-3, GLM-4
    plain      out(act(in(x)))                      GPT-NeoX, ViT, Whisper, Falcon
    first      act(in(x))                           BERT, whose second half is another module

Which of the linear layers is which, and the activation, is found by trying.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from powertrain.ops.activations import gated_activation
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.gemm.padded_mlp import has_odd_width, padded_mlp
from powertrain.patching.replace import is_plain_linear

KIND = "mlp"
Candidate = tuple[str, Callable[..., Any]]
# gelu before gelu_tanh: where both are within the bound, the first of equal distance is the exact one
_PLAIN = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared")
_GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "relu_squared_glu")


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Its linear layers, adapted and quantized ones of any class among them."""
    return {
        name: cast(nn.Linear, child)
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) or {"in_features", "out_features"} <= vars(child).keys()
    }


def is_mlp(module: nn.Module) -> bool:
    """One to three linear layers, beside them only activations, nothing of its own; it takes one tensor."""
    inner = linears(module)
    # a parameter of its own means a computation that no candidate has
    if not 1 <= len(inner) <= 3 or next(module.parameters(recurse=False), None) is not None:
        return False
    taken = inspect.signature(type(module).forward).parameters.values()
    # self, x
    if sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in taken) != 2:
        return False
    others = [child for name, child in module.named_children() if name not in inner]
    # a child with parameters is a norm or a gate of another kind
    if any(list(child.parameters()) or list(child.children()) for child in others):
        return False
    # dropout inside the layer would be skipped in training
    if any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p for child in others):
        return False
    has_activation = bool(others) or any(callable(value) for value in vars(module).values())
    # without an activation two linear layers could be anything; three are a gated layer whose activation is a function
    return has_activation or len(inner) == 3


def why_not(module: nn.Module) -> str | None:
    """Which linear layer is not a plain one, or None."""
    for name, child in linears(module).items():
        if not is_plain_linear(child):
            if type(child) is nn.Linear:
                return f"{name} has hooks, a forward of another library or a weight that is no plain parameter"
            return f"{name} is a {type(child).__module__.split('.')[0]} {type(child).__name__}"
    return None


def width(module: nn.Module) -> int:
    """Features of the input: those that the first linear layer to run takes; the others take its result's."""
    inner = list(linears(module).values())
    return inner[0].in_features


def candidates(module: nn.Module) -> list[Candidate]:
    inner = linears(module)
    if len(inner) == 3:
        return [
            (f"linear_activation, {kind}, gate {gate} and up {up} in one product", _separate(gate, up, down, kind))
            # permutations: which child is the gate is not known by name, and swiglu is not symmetric
            for gate, up, down in itertools.permutations(inner)
            if inner[gate].weight.shape == inner[up].weight.shape
            and inner[down].in_features == inner[gate].out_features
            for kind in _GATED
        ]
    if len(inner) == 1:
        return [(f"linear_activation, {kind}", _first(next(iter(inner)), kind)) for kind in _PLAIN]
    candidates: list[Candidate] = []
    # in and out may be square, so both orders are tried
    for first, second in itertools.permutations(inner):
        if inner[second].in_features == inner[first].out_features:
            candidates += [(f"linear_activation, {kind}", _plain(first, second, kind)) for kind in _PLAIN]
        if 2 * inner[second].in_features == inner[first].out_features:
            candidates += [
                (f"gated_activation, {kind}, {order}", _packed(first, second, kind, order))
                for kind in _GATED
                for order in ("gate_first", "up_first")
            ]
    return candidates


def _separate(gate: str, up: str, down: str, kind: str) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        first, second = self._modules[gate], self._modules[up]
        # children are looked up at each call: PEFT or a quantizer may have exchanged them since
        if args or options or not _serves(x, first, second):
            return type(self).forward(self, x, *args, **options)
        inner, last = dict(bias=first.bias, up_weight=second.weight, up_bias=second.bias), self._modules[down]
        if has_odd_width(x, first.weight) and _serves(x, last):
            return padded_mlp(x, first.weight, kind, last.weight, **inner, down_bias=last.bias)
        return last(linear_activation(x, first.weight, kind, **inner))

    return forward


def _packed(first: str, second: str, kind: Any, order: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        if args or options or torch.compiler.is_compiling():
            return type(self).forward(self, x, *args, **options)
        # the products stay nn.Linear calls, hooks and all; only the activation is fused
        return self._modules[second](gated_activation(self._modules[first](x), kind, order=order))

    return forward


def _plain(first: str, second: str, kind: str) -> Callable[..., Any]:
    half = _first(first, kind)

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        linear, last = self._modules[first], self._modules[second]
        if args or options or not _serves(x, linear):
            return type(self).forward(self, x, *args, **options)
        if has_odd_width(x, linear.weight) and _serves(x, last):
            return padded_mlp(x, linear.weight, kind, last.weight, bias=linear.bias, down_bias=last.bias)
        return last(half(self, x))

    return forward


def _first(name: str, kind: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        linear = self._modules[name]
        if args or options or not _serves(x, linear):
            return type(self).forward(self, x, *args, **options)
        return linear_activation(x, linear.weight, kind, bias=linear.bias)

    return forward


def _serves(x: Tensor, *linears: Any) -> bool:
    """Plain layers of x's dtype, which no global hook waits for, outside torch.compile, where Inductor fuses the
    activation by itself."""
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    return all(is_plain_linear(linear) and linear.weight.dtype is x.dtype for linear in linears)
