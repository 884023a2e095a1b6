"""fp8_gated_mlp: the bits of three fp8_linear and gated_activation; kernels that write FP8 beside the formulas."""

import re
import zlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from powertrain.ops.activations import (
    GATED,
    Gated,
    gated_activation,
    gated_activation_bwd_torch,
    gated_activation_torch,
)
from powertrain.ops.fp8.formulas import MAX, quantize_ref
from powertrain.ops.fp8.gated_mlp import FP8Weight, fp8_gated_mlp
from powertrain.ops.fp8.gated_mlp_kernels import Part, launch_gated
from powertrain.ops.fp8.linear import fp8_linear, quantized_weight
from powertrain.ops.fp8.quantize import fp8_quantize, same_bits
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.conftest import HAS_GPU, INTERPRET, SLOW_IN_INTERPRETER

# tokens, features in, inside, out: two tiles each way, the last ones partial, rows that are not whole 16 bytes
ODD = (70, 33, 75, 24)
WHOLE = (32, 16, 48, 16)
DELAYED = ([32.0, 64.0, 2.0], [32.0, 128.0, 0.0], [4.0, 64.0, 256.0])  # 0: by the tensor's own


def _some(values: Any, quick: Any) -> list[Any]:
    """Parameters: all where kernels are fast or absent, under the interpreter those in `quick`."""
    return [pytest.param(v, id=str(v), marks=() if v in quick else SLOW_IN_INTERPRETER) for v in values]


def _tensors(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    M, K, N, D = sizes
    shapes = ((2, M // 2, K), (N, K), (N, K), (D, N))
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def _apart(x: Tensor, *layers: FP8Weight, kind: Gated = "swiglu", **options: Any) -> Tensor:
    def product(x: Tensor, layer: FP8Weight) -> Tensor:
        weight, scales, amaxes, copies, main_grad = layer
        return fp8_linear(x, weight, scales=scales, amaxes=amaxes, weight_copies=copies, main_grad=main_grad, **options)

    gate, up, down = layers
    return product(gated_activation(product(x, gate), kind, up=product(x, up)), down)


def _in_one(x: Tensor, *layers: FP8Weight, kind: Gated = "swiglu", **options: Any) -> Tensor:
    gate, up, down = layers
    return fp8_gated_mlp(x, gate, up, down, kind, **options)


def _results(run: Any, tensors: list[Tensor], fields: dict[str, Any], **options: Any) -> list[Tensor | None]:
    """y, gradients, and whatever tensors of the fields are changed in place."""
    own = {name: [value.clone() for value in values] for name, values in fields.items()}
    layers = [
        FP8Weight(weight, **{name: values[i] for name, values in own.items()}) for i, weight in enumerate(tensors[1:])
    ]
    y = run(tensors[0], *layers, **options)
    leaves = [t for t in tensors if t.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True) if leaves else ()
    return [y.detach(), *grads, *(value for values in own.values() for value in values)]


def _same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def _delayed(device: torch.device) -> dict[str, Any]:
    amaxes = [torch.tensor([0.0, 1e9, 0.0], device=device) for _ in range(3)]
    return {"scales": [torch.tensor(s, device=device) for s in DELAYED], "amaxes": amaxes}


CALLS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "delayed": {},
    "tensor-e4m3": {"grad_format": "e4m3", "power_of_two": False, "fast": False},
    "row": {"by": "row"},
    "block": {"by": "block"},
    "block-hybrid": {"by": "block", "grad_format": "e5m2", "power_of_two": False},
}


_BITS = [(call, sizes, dtype) for call in CALLS for sizes, dtype in ((ODD, torch.bfloat16), (WHOLE, torch.bfloat16))]
_BITS += [(call, WHOLE, dtype) for call in ("delayed", "block") for dtype in (torch.float16, torch.float32)]
_QUICK = [_BITS[0], _BITS[3], _BITS[6], ("delayed", WHOLE, torch.float16)]


@pytest.mark.parametrize("call, sizes, dtype", [
    pytest.param(*row, marks=() if row in _QUICK else SLOW_IN_INTERPRETER) for row in _BITS
])  # fmt: skip
def test_bits_of_the_layers_apart(call: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """With every recipe y, dx, dW, and of delayed scaling the magnitudes."""
    tensors = _tensors(sizes, dtype, device)
    fields = _delayed(device) if call == "delayed" else {}
    found, exact = (_results(run, tensors, fields, **CALLS[call]) for run in (_in_one, _apart))
    assert _same(found, exact)
    if call == "delayed":
        assert torch.equal(found[5], fields["scales"][0]) and found[8][1] == 1e9 and found[8][2] > 0


@pytest.mark.parametrize("kind", _some(GATED, ["geglu", "clamped_swiglu"]))
def test_every_kind(kind: Gated, device: torch.device) -> None:
    tensors = _tensors((16, 16, 16, 16), torch.bfloat16, device)
    tensors[0].data.mul_(4)
    assert _same(*(_results(run, tensors, {}, kind=kind) for run in (_in_one, _apart)))


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_without_kernels_are_autograds(kind: Gated, dtype: torch.dtype) -> None:
    """To the bit, on the CPU, at the kinks and beyond the limits too."""
    gate, up, dy = (torch.randn(6, 37) * 8 for _ in range(3))
    gate[0, :4] = torch.tensor([0.0, -0.0, 7.0, torch.nan])
    up[1, :4] = torch.tensor([7.0, -7.0, torch.inf, torch.nan])
    gate, up, dy = (t.to(dtype) for t in (gate, up, dy))
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    y = gated_activation_torch(leaves[0], kind, leaves[1], None, "gate_first", 7.0, 1.702)
    exact = torch.autograd.grad(y, leaves, dy)
    for ours, right in zip(gated_activation_bwd_torch(dy, gate, up, kind, 7.0, 1.702), exact, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True)


# which of x, gate, up, down want no gradient
@pytest.mark.parametrize(
    "frozen", _some([(0,), (1,), (2,), (3,), (1, 2, 3), (0, 1, 2), (0, 1), (0, 1, 2, 3)], [(0, 1)])
)
def test_frozen(frozen: tuple[int, ...], device: torch.device) -> None:
    for call in ("delayed", "row"):
        tensors = _tensors(WHOLE, torch.bfloat16, device)
        for index in frozen:
            tensors[index].requires_grad_(False)
        fields = _delayed(device) if call == "delayed" else {}
        assert _same(*(_results(run, tensors, fields, **CALLS[call]) for run in (_in_one, _apart)))


@pytest.mark.parametrize("by", _some(["tensor", "row", "block"], ["tensor"]))
def test_main_grad_and_copies(by: str, device: torch.device) -> None:
    """Gradients are added to main_grad in float32; weights that are quantized already, both copies and data alone."""
    tensors = _tensors(WHOLE, torch.bfloat16, device)
    fields: dict[str, Any] = {"main_grad": [torch.ones_like(w, dtype=torch.float32) for w in tensors[1:]]}
    found, exact = (_results(run, tensors, fields, by=by) for run in (_in_one, _apart))
    assert _same(found, exact) and found[2] is None and not (found[5] == 1).all()
    plain = _results(_in_one, tensors, {}, by=by)
    copies = [quantized_weight(w.detach(), by) for w in tensors[1:]]
    rows = [fp8_quantize(w.detach(), by, columns=False) for w in tensors[1:]]
    for given in (copies, rows):
        layers = [FP8Weight(w, weight_copies=c) for w, c in zip(tensors[1:], given, strict=True)]
        assert _same(_results(lambda x, *_, layers=layers: _in_one(x, *layers, by=by), tensors, {}), plain)


@pytest.mark.parametrize("call", _some(["delayed", "block"], []))
def test_recomputed_and_compiled(call: str, device: torch.device) -> None:
    tensors = _tensors(WHOLE, torch.bfloat16, device)
    fields = _delayed(device) if call == "delayed" else {}
    exact = _results(_in_one, tensors, fields, **CALLS[call])

    def again(*args: Any, **options: Any) -> Tensor:
        return checkpoint(partial(_in_one, **options), *args, use_reentrant=False)

    assert _same(_results(again, tensors, fields, **CALLS[call]), exact)
    compiled = torch.compile(_in_one, fullgraph=True, backend="aot_eager")
    assert _same(_results(compiled, tensors, fields, **CALLS[call]), exact)


@pytest.mark.parametrize("sizes", _some([(0, 16, 16, 16), (4, 0, 16, 16), (4, 16, 0, 16), (4, 16, 16, 0)], []))
def test_empty(sizes: tuple[int, ...], device: torch.device) -> None:
    for call in ("tensor", "delayed", "row", "block"):
        tensors = _tensors(sizes, torch.bfloat16, device)
        fields = _delayed(device) if call == "delayed" else {}
        assert _same(*(_results(run, tensors, fields, **CALLS[call]) for run in (_in_one, _apart)))


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", _some([(70, 75), (64, 128), (1, 1), (3, 16)], [(70, 75), (1, 1)]))
def test_bytes_of_the_kernels(sizes: tuple[int, int], device: torch.device) -> None:
    """Data, transposed data, scales and magnitudes beside the formulas: NaN, infinities and every exponent among them;
    a given scale, an unknown one, of one half alone."""
    gate, up, dy = ((torch.randn(sizes) * torch.exp2(torch.randint(-20, 8, sizes).float())) for _ in range(3))
    gate[0, 0], dy[0, -1] = 0.0, 0.0
    if sizes[0] > 60:
        up[3, 4], dy[5, 6] = torch.inf, torch.nan
    gate, up, dy = (t.bfloat16().to(device) for t in (gate, up, dy))
    halves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    act = gated_activation(halves[0], "swiglu", up=halves[1])
    grads = torch.autograd.grad(act, halves, dy)
    own = torch.zeros(1, device=device)
    for d, right, scales in (
        (None, [act.detach()], [None]),
        (None, [act.detach()], [own]),
        (dy, grads, [None, None]),
        (dy, grads, [torch.full((1,), 8.0, device=device), own]),
    ):
        for format in MAX:
            copies = [
                quantize_ref(t.cpu(), "tensor", format, scale=None if s is None else s.cpu())
                for t, s in zip(right, scales, strict=True)
            ]
            parts = [
                Part(s, *(t.new_empty(t.shape, device=device) for t in (c.data, c.data_t, c.scale_inv)))
                for c, s in zip(copies, scales, strict=True)
            ]
            amax = torch.zeros(2, dtype=torch.int32, device=device)
            rest = parts[1] if d is not None else Part()
            launch_gated(d, gate, up, parts[0], rest, amax, "silu", 0.0, 0.0, format, True)
            for i, (part, exact) in enumerate(zip(parts, copies, strict=True)):
                assert same_bits(part.data, exact.data) and same_bits(part.data_t, exact.data_t)
                assert same_bits(part.scale_inv, exact.scale_inv)
                assert same_bits(amax[i : i + 1].view(torch.float32), exact.amax)


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("dtype, in_one", [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_what_a_gpu_would_launch(dtype: torch.dtype, in_one: bool) -> None:
    """By tensor in 16 bits no activation kernel and one quantization fewer of x, act, dgate and dup."""
    weights = [torch.empty(512, 512, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    x = torch.empty(512, 512, dtype=dtype, device="meta", requires_grad=True)
    for by in ("tensor", "row", "block"):
        with record("sm_90") as wanted:
            fp8_gated_mlp(x, *weights, by=by).sum().backward()
        kernels = {spec.kernel.name for spec in wanted.specs}
        ours = {"_gated_amax_kernel", "_gated_quantize_kernel"}
        theirs = {"_activation_fwd_kernel", "_activation_bwd_kernel"}
        assert kernels & (ours | theirs) == (ours if in_one and by == "tensor" else theirs)


@pytest.mark.skipif(HAS_GPU or INTERPRET, reason="needs a compiler, no GPU")
def test_accesses_of_16_bytes() -> None:
    """PTX for sm_90: gate, up and dy are read 16 bytes a thread where rows are whole ones, FP8 is always written so."""
    for N, narrow in ((512, set()), (500, {"ld"})):
        weights = [torch.empty(N, 512, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2)]
        down = torch.empty(512, N, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with record("sm_90") as wanted:
            fp8_gated_mlp(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"), *weights, down).sum().backward()
        entries = prebuild.build([s for s in wanted.specs if s.kernel.name.startswith("_gated_")]).entries
        assert len(entries) == 4
        for entry in entries:
            ptx = zlib.decompress(entry.members["ptx"]).decode()
            accesses = re.findall(r"\b(ld|st)\.global[\w.:]*\.[bu](?:8|16)\b", ptx)
            assert set(accesses) == narrow
            assert entry.manifest["launch"]["stack"] == 0


def test_flops_of_nine_products(device: torch.device) -> None:
    tensors = _tensors(WHOLE, torch.bfloat16, device)
    with FlopCounterMode(display=False) as counter:
        fp8_gated_mlp(*tensors).sum().backward()
    M, K, N, D = WHOLE
    assert counter.get_total_flops() == 3 * 2 * M * N * (2 * K + D)


_X, _W, _D = torch.zeros(4, 8), torch.zeros(16, 8), torch.zeros(8, 16)
_S = torch.ones(3)
_HALF, _COPIES = FP8Weight(_W, main_grad=_W.half()), FP8Weight(_D, weight_copies=quantized_weight(_W, "row"))


def _call(gate: Any = _W, up: Any = _W, down: Any = _D, kind: Any = "swiglu", x: Tensor = _X, **options: Any) -> Tensor:
    return fp8_gated_mlp(x, gate, up, down, kind, **options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"gate": _W[:, :7]}, "gate must have shape [16, 8] ([N, last dim of x]), got [16, 7]"),
        ({"up": _W[:9]}, "up must have shape [16, 8] (as gate), got [9, 8]"),
        ({"down": _W}, "down must have shape [16, 16] ([D, rows of gate]), got [16, 8]"),
        ({"up": _W.half()}, "up must have x's dtype float32, got float16"),
        ({"kind": "silu"}, "kind must be one of 'swiglu', 'geglu', "),
        ({"by": "group"}, "by must be one of 'tensor', 'row', 'block', got 'group'"),
        ({"grad_format": "e3m4"}, "grad_format must be one of 'e4m3', 'e5m2'"),
        ({"x": _X[0, 0]}, "x must have at least one dim, got a scalar"),
        ({"gate": FP8Weight(_W, _S)}, "scales must be given for gate, up and down or for none, got gate"),
        ({"up": FP8Weight(_W, _S[:2])}, "up's scales must have shape [3] (of input, weight and gradient), got [2]"),
        ({"gate": FP8Weight(_W, _S), "by": "row"}, "by must be one of 'tensor', got 'row'"),
        ({"gate": _HALF}, "gate's main_grad must be float32, got float16"),
        ({"down": _COPIES}, "down's weight_copies must have shape [8, 16] (rows, columns padded to 16), got [16, 16]"),
    ],
    ids=range(13),
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        _call(**arguments)
    assert str(error.value).startswith("fp8_gated_mlp: ") and message in str(error.value)
