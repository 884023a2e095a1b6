"""Calls that stand for activation and gated_activation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.activations import activation, activation_ref, gated_activation, gated_activation_ref
from powertrain.ops.cases import Case, randn


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {"x": randn(*shape, dtype=dtype, device=device)}


def _inputs_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {**_inputs(shape, dtype, device), "bias": randn(shape[-1], dtype=dtype, device=device)}


def _inputs_packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {"x": randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)}


def _inputs_two(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {name: randn(*shape, dtype=dtype, device=device) for name in ("x", "up")}


def _inputs_packed_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {
        **_inputs_packed(shape, dtype, device),
        "bias": randn(2 * shape[-1], dtype=dtype, device=device),
    }


def _plain_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def _plain_gated(act: Callable[[Tensor], Tensor], x: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    return act(gate) * up


def _plain_up_first(x: Tensor, bias: Tensor) -> Tensor:
    up, gate = (x + bias).chunk(2, dim=-1)
    return F.gelu(gate) * up


def _case(
    kind: Any,
    label: str,
    plain: Callable[..., Any],
    inputs: Any,
    full: tuple[int, int] = (16384, 14336),
    **options: Any,
) -> Case:
    op, ref = (gated_activation, gated_activation_ref) if "glu" in kind else (activation, activation_ref)
    run, reference = (partial(f, kind=kind, **options) for f in (op, ref))
    return Case(op.__name__, label, run, reference, plain, inputs, (7, 120), full)


CASES = [
    _case("gelu", "gelu-bias", _plain_gelu, _inputs_bias),
    _case("gelu_tanh", "gelu_tanh", partial(_plain_gelu, approximate="tanh"), _inputs),
    _case("swiglu", "swiglu", partial(_plain_gated, F.silu), _inputs_packed),
    _case("swiglu", "swiglu-two", partial(_plain_gated, F.silu), _inputs_two),
    _case("geglu", "geglu-up_first-bias", _plain_up_first, _inputs_packed_bias, order="up_first"),
    _case("swiglu", "swiglu-odd", partial(_plain_gated, F.silu), _inputs_packed, (16384, 1727)),
    _case("gelu", "gelu-bias-odd", _plain_gelu, _inputs_bias, (16384, 1727)),
]
