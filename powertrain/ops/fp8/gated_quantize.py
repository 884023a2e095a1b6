"""act(gate) * up and its gradients as the operands of FP8 products, in one kernel or apart.

By tensor, in 16 bits, kernels that compute a tile write its FP8 bytes (ops/fp8/gated_mlp_kernels.py). By row and block
a tile does not know its scales: it is written in 16 bits and quantized, likewise in float32 and where the kernels do
not pass their test. The bytes are the same.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from powertrain.ops.activation_kernels import activation_bwd, activation_fwd
from powertrain.ops.activations import (
    GATED,
    activation_bwd_op,
    gated_activation_bwd_torch,
    gated_activation_torch,
)
from powertrain.ops.fp8.formulas import DTYPES, Copies, Quantized, padded
from powertrain.ops.fp8.gated_mlp_kernels import Part, launch_gated
from powertrain.ops.fp8.operands import Options, columns_outputs, grad_operands, input_operands
from powertrain.ops.fp8.quantize import fp8_quantize, kernels_serve, same_bits, special_values
from powertrain.runtime import checks, self_test
from powertrain.runtime.dispatch import Op

# of an op's arguments: fields of Act and of Options
ACT_SCHEMA = "str kind, float limit, float alpha, bool act_kernel"
OPTIONS_SCHEMA = "str by, str grad_format, bool power_of_two, bool fast, bool kernel"


class Act(NamedTuple):
    """The activation: of the names of `activation`."""

    kind: str
    limit: float
    alpha: float
    kernel: bool  # computed by kernels, as `gated_activation` would be


def _in_one(x: Tensor, options: Options, act: Act) -> bool:
    """Whether the kernels that compute an activation [M, N] in x's dtype and quantize it serve."""
    if options.by != "tensor" or not (options.kernel and act.kernel) or x.element_size() != 2 or not x.numel():
        return False
    if not kernels_serve(x):
        return False
    test, name = partial(_self_test, dtype=x.dtype), f"fp8_gated_mlp in {checks.name(x.dtype)}"
    return self_test.passes(_self_tests[x.dtype], x.device, test, name, "activation and quantization apart are used")


def activated(
    gate: Tensor, up: Tensor, given: Tensor | None, options: Options, act: Act, keep: bool, measure: bool
) -> tuple[Copies, Quantized]:
    """act(gate) * up as `input_operands` gives them: by rows, and transposed."""
    if not _in_one(gate, options, act):
        return input_operands(_act(gate, up, act), given, options, keep, measure)
    (R, C), none = gate.shape, gate.new_empty(0, dtype=torch.float32)
    amax = none.new_zeros(1 if measure else 0)
    data = gate.new_empty((R, padded(C)), dtype=DTYPES["e4m3"])
    data_t, kept_inv = columns_outputs(gate, "tensor", keep)
    inv = kept_inv if keep else none.new_empty(1)
    part = Part(given, data, data_t if keep else None, inv)
    launch_gated(
        None, gate, up, part, Part(), amax.view(torch.int32) if measure else None, act.kind, act.limit, act.alpha,
        "e4m3", options.power_of_two,
    )  # fmt: skip
    return Copies(data, data_t, none, inv, none, amax), Quantized(data_t, kept_inv)


def _act(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    if act.kernel:
        return activation_fwd(gate, up, None, act.kind, "gate_first", True, act.limit, act.alpha)
    return gated_activation_torch(gate, _gated_name(act.kind), up, None, "gate_first", act.limit, act.alpha)


def _gated_name(kind: str) -> str:
    return next(name for name, act in GATED.items() if act == kind)


def gated_grads(
    dact: Tensor, gate: Tensor, up: Tensor, given: list[Tensor | None], folds: list[Tensor | None], act: Act,
    options: Options, needs: tuple[bool, bool, bool], measure: bool,
) -> Iterator[tuple[Quantized, Quantized, Tensor]]:  # fmt: skip
    """Gradients of gate, then of up, as `grad_operands` gives them; needs: whether dx, dWgate and dWup are wanted."""
    if options.by == "tensor":
        out = list(_grads_op(dact, gate, up, *given, *act, *options, *needs, measure))
        del dact
        for _ in range(2):
            data, inv, data_t, amax = (out.pop(0) for _ in range(4))
            yield Quantized(data, inv), Quantized(data_t, inv), amax
        return
    wanted = needs[0] or needs[1], needs[0] or needs[2]
    halves = list(_act_grads(dact, gate, up, act, wanted, activation_bwd_op))
    # its memory serves the copies; so does that of each half once it is quantized
    del dact
    for fold, need in zip(folds, needs[1:], strict=True):
        yield grad_operands(halves.pop(0), None, fold, options, needs[0], need, False)


def _grads_outputs(
    dact: Tensor, gate: Tensor, up: Tensor, gate_given: Tensor | None, up_given: Tensor | None, kind: str,
    limit: float, alpha: float, act_kernel: bool, by: str, grad_format: str, power_of_two: bool, fast: bool,
    kernel: bool, need_x: bool, need_gate: bool, need_up: bool, measure: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of gate, then of up, by tensor: data by rows, scale_inv, data transposed, amax."""
    (M, N), none, dtype = gate.shape, gate.new_empty(0, dtype=torch.float32), DTYPES[grad_format]
    out: list[Tensor] = []
    for need in (need_gate, need_up):
        data = none.new_empty((M, padded(N)) if need_x else 0, dtype=dtype)
        data_t = none.new_empty((N, padded(M)) if need else 0, dtype=dtype)
        wanted = need_x or need
        out += [data, none.new_empty(int(wanted)), data_t, none.new_empty(int(measure and wanted))]
    return tuple(out)


def _wanted(data: Tensor, data_t: Tensor, inv: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """None for memory that is not wanted."""
    return data if data.numel() else None, data_t if data_t.numel() else None, inv if inv.numel() else None


def _grads(
    dact: Tensor, gate: Tensor, up: Tensor, gate_given: Tensor | None, up_given: Tensor | None, kind: str,
    limit: float, alpha: float, act_kernel: bool, by: str, grad_format: str, power_of_two: bool, fast: bool,
    kernel: bool, need_x: bool, need_gate: bool, need_up: bool, measure: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    act, options = Act(kind, limit, alpha, act_kernel), Options(by, grad_format, power_of_two, fast, kernel)
    needs, given = (need_gate, need_up), (gate_given, up_given)
    wanted = need_x or need_gate, need_x or need_up
    if _in_one(gate, options, act):
        out = _grads_outputs(
            dact, gate, up, gate_given, up_given, kind, limit, alpha, act_kernel, by, grad_format, power_of_two, fast,
            kernel, need_x, need_gate, need_up, measure,
        )  # fmt: skip
        amax = dact.new_zeros(2, dtype=torch.int32) if measure else None
        first, second = (Part(given[i], *_wanted(out[4 * i], out[4 * i + 2], out[4 * i + 1])) for i in range(2))
        launch_gated(
            dact.contiguous(), gate.contiguous(), up.contiguous(), first, second, amax, kind, limit, alpha,
            grad_format, power_of_two,
        )  # fmt: skip
        if amax is not None:
            for i in range(2):
                # into memory of its own, since an op's results share none
                out[4 * i + 3].copy_(amax[i : i + int(wanted[i])].view(torch.float32))
        return out
    results: list[Tensor] = []
    for half, scale, need, is_wanted in zip(_act_grads(dact, gate, up, act, wanted), given, needs, wanted, strict=True):
        if is_wanted:
            rows, columns, found = grad_operands(half, scale, None, options, need_x, need, measure)
            results += [*rows, columns.data, found]
        else:
            none = dact.new_empty(0, dtype=torch.float32)
            empty = none.new_empty(0, dtype=DTYPES[grad_format])
            results += [empty, none, empty, none]
    # no tensor twice
    return tuple(t if t.numel() else torch.empty_like(t) for t in results)


def _act_grads(
    dact: Tensor, gate: Tensor, up: Tensor, act: Act, wanted: tuple[bool, bool], by: Any = activation_bwd
) -> tuple[Tensor, Tensor]:
    """dgate and dup in 16 bits, by kernels launched by `activation_bwd`, or by the op of that name."""
    if act.kernel:
        dgate, dup, _ = by(dact, gate, up, None, act.kind, "gate_first", True, act.limit, act.alpha, *wanted, False)
        return dgate, dup
    return gated_activation_bwd_torch(dact, gate, up, _gated_name(act.kind), act.limit, act.alpha)


_self_tests: dict[torch.dtype, dict[int | None, str | None]] = defaultdict(dict)


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Bytes, scales and magnitudes beside those of the kernels apart."""
    gate = special_values().to(device, dtype)
    up, dy = gate.flip(0).contiguous(), gate.flip(1).contiguous()
    act = Act("silu", 0.0, 0.0, True)
    for format in DTYPES:
        for d in (None, dy):
            right = [_act(gate, up, act)] if d is None else list(_act_grads(dy, gate, up, act, (True, True)))
            exact = [fp8_quantize(t, "tensor", format, measure=True) for t in right]
            ours = [_nothing_of(copies) for copies in exact]
            amax = gate.new_zeros(2, dtype=torch.int32)
            launch_gated(d, gate, up, ours[0], Part() if d is None else ours[1], amax, "silu", 0.0, 0.0, format, True)
            for i, (found, copies) in enumerate(zip(ours, exact, strict=True)):
                found_amax = amax[i : i + 1].view(torch.float32)
                pairs = zip((*found[1:], found_amax), (*copies[:2], copies.scale_inv, copies.amax), strict=True)
                if not all(t is not None and same_bits(t, e) for t, e in pairs):
                    name = "act" if d is None else ("dgate", "dup")[i]
                    return f"{name} in {format} differs from quantization apart (triton {triton.__version__})"
    return None


def _nothing_of(copies: Copies) -> Part:
    """Memory of the same shapes, with other bytes."""
    data, data_t, inv = ((~t.view(torch.uint8)).view(t.dtype) for t in (*copies[:2], copies.scale_inv))
    return Part(None, data, data_t, inv)


_grads_op = Op(
    "fp8_gated_grads(Tensor dact, Tensor gate, Tensor up, Tensor? gate_given, Tensor? up_given, "
    f"{ACT_SCHEMA}, {OPTIONS_SCHEMA}, bool need_x, bool need_gate, bool need_up, bool measure) -> "
    f"({', '.join(['Tensor'] * 8)})",
    _grads,
    _grads_outputs,
    replays=False,
)
