"""rms_norm and layer_norm: every option, size class and error."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops import norm_fwd_kernels
from powertrain.ops.norm import layer_norm, layer_norm_ref, rms_norm, rms_norm_ref
from powertrain.ops.norm_bwd_kernels import _plan_bwd
from powertrain.ops.row_groups import row_groups
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check
from tests.torch_setup import SLOW_IN_INTERPRETER

SM_90 = Target.parse("sm_90")
compiled = pytest.mark.skipif(settings().interpret, reason="nothing is compiled in the interpreter")


def _tensors(device: torch.device, M: int, N: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    made = {
        "x": torch.randn(M, N, device=device) + 0.5,
        "weight": torch.randn(N, device=device),
        "bias": torch.randn(N, device=device),
        "residual": torch.randn(M, N, device=device),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in made.items()}


def _check(op: object, ref: object, tensors: dict[str, Tensor | None], **options: object) -> None:
    check(lambda **t: op(**t, **options), lambda **t: ref(**t, **options), lambda **t: ref(**t, **options), tensors)


# 3: tiny; 2047: one under a power of two; 9008, 9010: a tail behind 8192, in whole vectors or not; 16384: the widest
# block; 20000: a tail behind it; 24584: read again for each pass, ragged last chunk; 49160: in several steps
# rows that are read again have the same plan among few, but for the number of programs, and cost the interpreter most
@pytest.mark.parametrize(
    "N, are_few",
    [
        pytest.param(
            N, are_few, id=f"{'few' if are_few else 'many'}-D{N}",
            marks=SLOW_IN_INTERPRETER if are_few and N > 24576 else (),
        )
        for are_few in (False, True)
        for N in (3, 2047, 9008, 9010, 16384, 20000, 24584, 49160)
    ],
)  # fmt: skip
@pytest.mark.parametrize("op, ref", [(rms_norm, rms_norm_ref), (layer_norm, layer_norm_ref)], ids=["rms", "layer"])
def test_sizes(
    op: object, ref: object, N: int, are_few: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_fwd_kernels, "_FEW_ROWS", 2 if are_few else 0)
    _check(op, ref, _tensors(device, 3, N))


# on a GPU: plans of few rows differ, and sums must not; narrow rows share programs, 933 has a tail
@pytest.mark.parametrize("N", [8, 72, 113, 256, 933, 1024, 3000, 5120, 8192, 16384, 20000], ids=lambda n: f"D{n}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.kernels
def test_a_row_has_the_same_bits_among_few_and_many(N: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = 600 if device.type == "cuda" else 7
    x, weight, bias, residual = (None if t is None else t.detach() for t in _tensors(device, rows, N, dtype).values())
    assert x is not None and residual is not None
    for op in (rms_norm, layer_norm):
        many = (op(x, weight), *op(x, weight, bias, residual=residual))
        few = (op(x[:3], weight), *op(x[:3], weight, bias, residual=residual[:3]))
        for all_rows, first in zip(many, few, strict=True):
            assert torch.equal(all_rows[:3], first)


# the borders of the forward's plans for 2 bytes: in registers to 6144, then 16 warps, of LayerNorm 8; 32 from 32769;
# several steps from 49153, with a residual from 20481 or, where rows are no whole vectors, 8193
_WIDE = (6144, 6145, 8193, 18432, 18440, 20001, 28672, 32769, 49160, 70000)


@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("N", _WIDE, ids=lambda n: f"D{n}")
@pytest.mark.kernels
def test_wide_rows(N: int, with_residual: bool, device: torch.device) -> None:
    tensors = _tensors(device, 2, N, torch.bfloat16 if N % 3 else torch.float16)
    if not with_residual:
        tensors["residual"] = None
    given = {name: None if t is None else t.detach() for name, t in tensors.items()}
    _check(rms_norm, rms_norm_ref, given | {"bias": None}, zero_centered=N % 2 == 0)
    _check(layer_norm, layer_norm_ref, given)


# rows read again, in one step and in several: the mean is subtracted before anything is squared
@pytest.mark.parametrize("N", [24600, 49160], ids=lambda n: f"D{n}")
@pytest.mark.kernels
def test_large_mean(N: int, device: torch.device) -> None:
    x = torch.randn(2, N, device=device) + 1000
    _check(layer_norm, layer_norm_ref, {"x": x})


# rows of which 1, 2, 4 and 8 elements are a vector, below and above 256 columns and 4096, and several programs of
# several rows; N, rows, stages, warps of the backward's plan
_ODD = {
    97: (2, 1, 1), 98: (2, 1, 1), 100: (2, 1, 1), 104: (32, 3, 8), 255: (1, 1, 1), 257: (1, 1, 1), 258: (1, 1, 1),
    583: (1, 1, 1), 1025: (1, 1, 2), 4095: (1, 1, 4), 4097: (1, 3, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        # of bfloat16's size, by which vectors are counted
        pytest.param(torch.float16, id="fp16", marks=SLOW_IN_INTERPRETER),
        pytest.param(torch.bfloat16, id="bf16"),
    ],
)
@pytest.mark.parametrize("N", _ODD, ids=lambda n: f"D{n}")
@pytest.mark.kernels
def test_odd_widths(N: int, dtype: torch.dtype, device: torch.device) -> None:
    M = 70 if N < 256 else 5
    tensors = _tensors(device, M, N, dtype) | {"residual": None}
    _check(rms_norm, rms_norm_ref, tensors | {"bias": None})
    _check(layer_norm, layer_norm_ref, tensors)


def test_plans_of_odd_widths() -> None:
    plans = {N: _plan_bwd(100_000, N, False, False, 4, 2, SM_90) for N in _ODD}
    assert {N: (plan.block_m, plan.pipeline, plan.num_warps) for N, plan in plans.items()} == _ODD


@compiled
@pytest.mark.parametrize("inputs", ["", "bias residual"])
@pytest.mark.parametrize("N", [75, 128, 201, 256, 512, 933, 1024, 2048])
def test_programs_of_the_backward_fit_on_an_sm(N: int, inputs: str) -> None:
    """All at once: those that wait for others take as long again. 192 columns took 3.5 times as long for it."""
    M, op = 100_000, layer_norm if inputs else rms_norm
    x, weight, bias, residual = (torch.empty(*shape, N, dtype=torch.bfloat16, device="meta", requires_grad=True)
                                 for shape in ((M,), (), (), (M,)))  # fmt: skip
    options = {"bias": bias if "bias" in inputs else None, "residual": residual if "residual" in inputs else None}
    with record("sm_90") as wanted:
        out = op(x, weight, **options)
        sum(torch.sum(y) for y in (out if isinstance(out, tuple) else (out,))).backward()
    [spec] = [spec for spec in wanted.specs if spec.kernel.name == "_norm_bwd_kernel"]
    plan = _plan_bwd(M, N, op is layer_norm, "bias" in inputs, 6 if "residual" in inputs else 4, 2, SM_90)
    facts = entry_for(spec)[0].manifest["launch"]
    programs = plan.programs // SM_90.num_sms
    assert programs * 32 * plan.num_warps * facts["registers"] <= SM_90.registers_per_sm
    assert facts["stack"] <= 32


@pytest.mark.parametrize("casting", ["llama", "gemma", "te"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_casting(casting: str, zero_centered: bool, device: torch.device) -> None:
    _check(
        rms_norm, rms_norm_ref, _tensors(device, 4, 96, torch.bfloat16), casting=casting, zero_centered=zero_centered
    )


@pytest.mark.parametrize("left_out", ["weight", "bias", "residual"])
@pytest.mark.parametrize("op, ref", [(rms_norm, rms_norm_ref), (layer_norm, layer_norm_ref)], ids=["rms", "layer"])
def test_optional_arguments(op: object, ref: object, left_out: str, device: torch.device) -> None:
    _check(op, ref, {**_tensors(device, 4, 40), left_out: None}, zero_centered=True)


@pytest.mark.parametrize("N", [72, 6100, 16504, 16500], ids=["block", "tail", "again", "steps"])
def test_mixed_dtypes(N: int, device: torch.device) -> None:
    tensors = _tensors(device, 3, N)
    tensors["x"] = tensors["x"].detach().bfloat16().requires_grad_()
    _check(rms_norm, rms_norm_ref, tensors)
    y, h = rms_norm(**tensors)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)


def test_only_the_residual_sum_used(device: torch.device) -> None:
    tensors = _tensors(device, 3, 16)
    _, h = rms_norm(**tensors)
    dx, dw = torch.autograd.grad(h.sum(), (tensors["x"], tensors["weight"]), allow_unused=True)
    # an optimizer leaves a parameter without a gradient as it is; one of zeros decays
    assert torch.equal(dx, torch.ones_like(dx)) and dw is None


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape and not weight.grad.any()


# of x [2, 5, 3, N]: rows that lie elsewhere, and whether kernels read them where they are
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    # the first ones: others begin at another address, which the order of a sum may depend on
    "heads of a projection": (lambda x: torch.cat([x, x, x], 2)[:, :, :3], True),
    "tokens before heads": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "tokens before sequences": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), True),
    "without the last token": (lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1], True),
    "every second head": (lambda x: x.repeat_interleave(2, 2)[:, :, ::2], True),
    "one sequence twice": (lambda x: x[:1].expand(2, -1, -1, -1), True),
    "columns of wider rows": (lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]], True),
    "one row": (lambda x: x[1:, 2:3, ::5], True),
    "a last dim with a stride": (lambda x: x.mT.contiguous().mT, False),
    "five dims, three distances": (lambda x: torch.stack([x, x], 1)[:, :, ::2, :2], True),
    "five dims, four distances": (lambda x: torch.stack([x, x, x], 1)[:, :2, ::2, :2], False),
}


# 9010: read in passes; 20000: a tail behind 16384
@pytest.mark.parametrize("N", [24, 65, *(pytest.param(N, marks=SLOW_IN_INTERPRETER) for N in (3, 2047, 9010, 20000))])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.kernels
def test_rows_that_lie_anywhere(layout: str, N: int, device: torch.device) -> None:
    """The bits of dense rows, in gradients too."""
    make, in_place = LAYOUTS[layout]

    def made(dtype: torch.dtype) -> Tensor:
        return make(torch.randn(2, 5, 3, N, device=device, dtype=dtype)).detach()

    x, dy = made(torch.bfloat16), made(torch.bfloat16)
    residual, dh = made(torch.float32), made(torch.float32)
    weight, bias = torch.randn(N, device=device), torch.randn(N, device=device)
    assert (row_groups(x)[0][0] is x) is in_place
    for op in (rms_norm, layer_norm):
        for others, gradients in (((None,), (dy,)), ((residual,), (dy, dh)), ((residual,), (dy.contiguous(), dh))):
            found = _with_gradients(op, (x, weight, bias, *others), gradients)
            exact = _with_gradients(op, (x.contiguous(), weight, bias, *others), [g.contiguous() for g in gradients])
            for ours, expected in zip(found, exact, strict=True):
                assert torch.equal(ours, expected)
            if layout.startswith("tokens before") and others == (None,):
                assert found[1].stride() == x.stride()


def _with_gradients(op: Any, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Results, then the gradients of x, weight, bias and residual."""
    x, weight, bias, residual = (None if t is None else t.detach().requires_grad_() for t in tensors)
    result = op(x, weight, bias, residual=residual)
    results = result if isinstance(result, tuple) else (result,)
    leaves = [t for t in (x, weight, bias, residual) if t is not None]
    return [*results, *torch.autograd.grad(results, leaves, gradients)]


def test_errors(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\] \(last dim of x\), got \[4\]"):
        rms_norm(x, torch.ones(4, device=device))
    with pytest.raises(ValueError, match="layer_norm: residual must have shape"):
        layer_norm(x, residual=torch.ones(2, 4, device=device))
    with pytest.raises(ValueError, match="casting must be one of 'llama', 'gemma', 'te', got 'x'"):
        rms_norm(x, casting="x")
    with pytest.raises(ValueError, match="x must be float32, float16 or bfloat16, got int64"):
        rms_norm(torch.ones(2, 8, dtype=torch.int64, device=device))


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    x = torch.randn(131073, 16384, device=device, dtype=torch.bfloat16).requires_grad_()
    y = rms_norm(x)
    y.backward(torch.ones_like(y))
    tail = x.detach()[-2:].clone().requires_grad_()
    expected = rms_norm(tail)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(y[-2:], expected) and torch.equal(x.grad[-2:], tail.grad)
