"""PyTorch's kernels and the flash-attn packages as backends: what they compute, and what they are called with."""

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import NoBackendError, attention, varlen_attention
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends import flash_attn, packed_flash, zero_padding
from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.layouts import from_bhsd, to_bhsd
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.problem import AttentionCall, Layout, Sizes, Varlen
from powertrain.runtime import settings as settings_module
from powertrain.runtime.compile.prebuild import build
from powertrain.runtime.errors import CompileError, CompileTimeout
from powertrain.runtime.recording import record
from powertrain.runtime.target import _ARCHS
from powertrain.runtime.tracing import trace
from powertrain.testing.numerics import check

TOP_LEFT: dict[str, Any] = {"is_causal": True, "causal_align": "top_left"}
TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda x: x,
    "bhsd": lambda x: x.transpose(1, 2),
    "sbhd": lambda x: x.transpose(0, 1),
}


def _tensors(
    device: torch.device, dtype: torch.dtype, sq: int, sk: int, heads: tuple[int, int], dims: tuple[int, int]
) -> dict[str, Tensor | None]:
    shapes = {"query": (sq, heads[0], dims[0]), "key": (sk, heads[1], dims[0]), "value": (sk, heads[1], dims[1])}
    return {n: torch.randn(2, *s, device=device).to(dtype).requires_grad_() for n, s in shapes.items()}


def _judge(
    backend: str,
    tensors: dict[str, Tensor | None],
    mask: MaskSpec,
    bias: Tensor | None = None,
    layout: Layout = "bshd",
    **options: Any,
) -> None:
    move = TO_LAYOUT[layout]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Any:
        q, k, v = (move(x) for x in (query, key, value))
        return move(attention(q, k, v, backend=backend, layout=layout, deterministic=False, **options))

    def reference(query: Tensor, key: Tensor, value: Tensor, upcast: bool = True) -> Tensor:
        return attention_ref(query, key, value, mask=mask, tensors=MaskTensors(bias=bias), upcast=upcast)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference(query, key, value, upcast=False)

    check(ours, plain, reference, tensors)


CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_cpu_layouts(layout: Layout) -> None:
    tensors = _tensors(CPU, torch.bfloat16, 37, 37, (4, 2), (24, 24))
    _judge("cpu", tensors, MaskSpec(right=0), layout=layout, **TOP_LEFT)


# more queries than keys and the reverse, head dims of no multiple
@pytest.mark.parametrize("sq, sk", [(37, 53), (53, 37)])
def test_cpu_lengths(sq: int, sk: int) -> None:
    _judge("cpu", _tensors(CPU, torch.bfloat16, sq, sk, (2, 2), (23, 23)), MaskSpec(right=0), **TOP_LEFT)


@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 1, 37, 53), (2, 1, 1, 53)])
def test_cpu_dense_masks(shape: tuple[int, ...]) -> None:
    tensors = _tensors(CPU, torch.bfloat16, 37, 53, (4, 2), (16, 16))
    visible = torch.rand(shape) > 0.4
    visible[0, :, 0] = False  # a row that sees nothing gives zeros and no gradient
    _judge("cpu", tensors, MaskSpec(bias="bool"), visible, attn_bias=visible)
    added = torch.randn(shape).bfloat16()
    _judge("cpu", tensors, MaskSpec(bias="float"), added, attn_bias=added)


def test_cpu_lse() -> None:
    q, k, v = (torch.randn(2, 9, 3, 16) for _ in range(3))
    (out, lse), (expected, expected_lse) = (
        attention(q, k, v, return_lse=True, backend=n) for n in ("cpu", "reference")
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8)])
def test_cpu_is_not_given_empty_tensors(shape: tuple[int, ...]) -> None:
    """They end the process with a floating point exception (torch 2.13)."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    assert attention(q, k, v).shape == shape
    with pytest.raises(NoBackendError, match="no empty tensors"):
        attention(q, k, v, backend="cpu")


def test_views() -> None:
    for layout in ("bshd", "bhsd", "sbhd"):
        x = torch.randn(2, 3, 4, 5)
        there = to_bhsd(x, layout)
        assert there.data_ptr() == x.data_ptr() and from_bhsd(there, layout).equal(x)


@pytest.mark.kernels
def test_zero_tail(device: torch.device) -> None:
    starts = torch.tensor([0, 3, 3, 130], dtype=torch.int32, device=device)
    x = torch.full((200, 3, 400), torch.nan, device=device)
    zero_padding.zero_tail(x, starts)
    assert x[:130].isnan().all() and not x[130:].any()
    full = torch.tensor([0, 200], dtype=torch.int32, device=device)
    assert zero_padding.zero_tail(x, full)[:130].isnan().all()
    lse = zero_padding.empty_tail(torch.zeros(3, 200, device=device), starts)
    assert not lse[:, :130].any() and (lse[:, 130:] == -torch.inf).all()
    ahead = torch.tensor([70, 80, 150], dtype=torch.int32, device=device)
    x = zero_padding.zero_tail(torch.full((200, 3, 400), torch.nan, device=device), ahead, ahead=True)
    assert not x[:70].any() and x[70:150].isnan().all() and not x[150:].any()
    lse = zero_padding.empty_tail(torch.zeros(3, 200, device=device), ahead)
    assert (lse[:, :70] == -torch.inf).all() and not lse[:, 70:150].any() and (lse[:, 150:] == -torch.inf).all()


@pytest.mark.kernels
def test_packed_flash_is_zero_outside_of_sequences(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, whatever PyTorch's kernels leave there; they are replaced, as the CPU has none."""

    def product(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, ...]:
        left_there = torch.full_like(q, torch.nan)
        left_there[1:5] = (q * k * v)[1:5] + options.get("window_size_left", 0)
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        return left_there, torch.zeros(2, 7, device=q.device), state, state.clone(), state.clone()

    def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, ...]:
        left_there = [torch.full_like(q, torch.nan) for _ in range(3)]
        for grad, others in zip(left_there, ((k, v), (q, v), (q, k)), strict=True):
            grad[1:5] = (do * others[0] * others[1])[1:5]
        return tuple(left_there)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", product)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", gradients)
    starts = torch.tensor([1, 2, 5], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(7, 2, 4, device=device, requires_grad=True) for _ in range(3))
    call = AttentionCall(
        q, k, v, "thd", MaskSpec(left=3, right=0), MaskTensors(), Varlen(starts, starts), 0.5, 0.0, None, True, False,
        Sizes(2, 2, 2, 7, 7),
    )  # fmt: skip
    out, lse = packed_flash.attend(call, False, [3, 0])
    exact = torch.zeros_like(out)
    exact[1:5] = (q * k * v)[1:5] + 3
    assert lse is not None and torch.equal(out, exact) and not lse.requires_grad and (lse[:, 5:] == -torch.inf).all()
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for grad, right in zip(found, torch.autograd.grad(exact.sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, right)


@pytest.mark.skipif(settings_module.settings().interpret, reason="nothing is compiled under the interpreter")
def test_zero_tail_compiles_for_every_arch() -> None:
    specs = []
    for arch in _ARCHS:
        with record(f"sm_{arch}") as wanted:
            x = torch.empty(300, 4, 64, dtype=torch.bfloat16, device="meta")
            zero_padding.zero_tail(x, torch.empty(4, dtype=torch.int32, device="meta"))
        specs += wanted.specs
    report = build(specs)
    assert len(report.entries) == len(_ARCHS) and not report.failures


GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_gpu_layouts(backend: str, layout: Layout, device: torch.device) -> None:
    tensors = _tensors(device, torch.bfloat16, 320, 320, (4, 2), (64, 64))
    _judge(backend, tensors, MaskSpec(right=0), layout=layout, is_causal=True)


@GPU
@pytest.mark.parametrize("d", [8, 40, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_gpu_head_dims(backend: str, d: int, device: torch.device) -> None:
    if backend == "cudnn" and d > 128 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN takes wide heads on sm_90")
    _judge(backend, _tensors(device, torch.bfloat16, 200, 200, (2, 2), (d, d)), MaskSpec(right=0), is_causal=True)


@GPU
@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_gpu_head_dims_that_differ(backend: str, device: torch.device) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on sm_90")
    _judge(backend, _tensors(device, torch.bfloat16, 200, 200, (2, 2), (192, 128)), MaskSpec(right=0), is_causal=True)


@GPU
@pytest.mark.parametrize("sq, sk", [(200, 328), (328, 200)])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_gpu_lengths_that_differ(backend: str, sq: int, sk: int, device: torch.device) -> None:
    bottom_right = backend == "flash"
    align: Any = "bottom_right" if bottom_right else "top_left"
    tensors = _tensors(device, torch.bfloat16, sq, sk, (2, 2), (64, 64))
    mask = MaskSpec(right=0, bottom_right=bottom_right)
    _judge(backend, tensors, mask, is_causal=True, causal_align=align)


@GPU
def test_gpu_dense_masks_of_cudnn(device: torch.device) -> None:
    tensors = _tensors(device, torch.bfloat16, 256, 256, (4, 2), (64, 64))
    visible = torch.rand(2, 1, 256, 256, device=device) > 0.4
    visible[0, :, 3] = False
    _judge("cudnn", tensors, MaskSpec(bias="bool"), visible, attn_bias=visible)


@GPU
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 0)])
def test_gpu_packed_flash_keeps_the_contract(window: tuple[int, int], device: torch.device) -> None:
    """An empty sequence in the middle, and rows past the last: zeros and -inf, and NaN there does not leak."""
    starts = torch.tensor([0, 100, 100, 256], dtype=torch.int32, device=device)
    made = {}
    leaves = [torch.randn(300, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    for x in leaves:
        x[256:] = torch.nan
    for backend in ("flash", "reference"):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        out = varlen_attention(q, k, v, starts, window_size=window, deterministic=False, backend=backend)
        out.float().square().sum().backward()
        made[backend] = (out, q.grad, k.grad, v.grad)
    for ours, expected in zip(made["flash"], made["reference"], strict=True):
        assert ours is not None and expected is not None
        assert not ours[256:].any()
        torch.testing.assert_close(ours[:256], expected[:256], rtol=0.05, atol=0.05)


def _call(layout: Layout = "bshd", mask: MaskSpec | None = None, **options: Any) -> AttentionCall:
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    usual: dict[str, Any] = {"scale": 0.25, "dropout_p": 0.0, "return_lse": False, "deterministic": False}
    usual |= options
    return AttentionCall(
        q, k, v, layout, mask or MaskSpec(right=0), MaskTensors(), Varlen(), dropout_seed=None,
        sizes=Sizes(2, 2, 2, 6, 6), **usual,
    )  # fmt: skip


def _package(monkeypatch: pytest.MonkeyPatch, name: str, result: Any) -> dict[str, Any]:
    """A module `name` whose flash_attn_func notes its arguments."""
    seen: dict[str, Any] = {}

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Any:
        seen.update(named, positional=arguments, shape=tuple(q.shape), calls=seen.get("calls", 0) + 1)
        return result(q)

    module = types.ModuleType(name)
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    if "." in name:
        monkeypatch.setitem(sys.modules, name.split(".")[0], types.ModuleType(name.split(".")[0]))
    return seen


def test_flash_attn_2_is_called_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    lse = torch.tensor([[[torch.inf, 1.0]]])
    seen = _package(monkeypatch, "flash_attn", lambda q: (q, lse, None))
    mask = MaskSpec(left=3, right=0, softcap=5.0)
    out, found = BACKENDS["flash-attn-2"].run(_call("bhsd", mask, return_lse=True, dropout_p=0.5, deterministic=True))
    assert seen["positional"] == (0.5, 0.25, True, (3, 0), 5.0, None, True, True)
    assert seen["shape"] == (2, 2, 6, 8) and out.shape == (2, 6, 2, 8), "the layout is its own, and the caller's after"
    assert found is not None and found.flatten().tolist() == [-torch.inf, 1.0]


def test_flash_attn_3_is_called_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _package(monkeypatch, "flash_attn_interface", lambda q: q)
    out, lse = BACKENDS["flash-attn-3"].run(_call())
    assert lse is None and out.shape == (2, 6, 2, 8)
    assert seen["softmax_scale"] == 0.25 and seen["causal"] is True and seen["window_size"] == (-1, 0)


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(seconds: str) -> None:
        monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", seconds)
        settings_module.reload()

    yield set_to
    monkeypatch.undo()
    settings_module.reload()


def test_waiting_for_a_compile_says_so_and_ends(
    deadline: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline("0.05")
    monkeypatch.setattr(flash_attn, "_PATIENCE", 0.01)
    never = threading.Event()

    def wait() -> None:
        never.wait()

    with pytest.raises(CompileTimeout, match=r"x compiles: not done after 0.05 s; set POWERTRAIN_COMPILE_TIMEOUT"):
        flash_attn.wait_for(wait, "x compiles")
    never.set()
    assert "x compiles ... at most 0.05 s" in capsys.readouterr().err
    flash_attn.wait_for(lambda: None, "y compiles")
    assert any("y compiles" in event.text for event in trace())


def test_flash_attn_4_compiles_each_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _package(monkeypatch, "flash_attn.cute", lambda q: (q, None))
    backend = flash_attn.FlashAttention4()
    compiled = []

    def compile_(call: AttentionCall, *tensors: Any) -> None:
        compiled.append(call.mask)

    monkeypatch.setattr(backend, "_compile", compile_)
    for mask in (MaskSpec(right=0), MaskSpec(right=0), MaskSpec(left=4, right=4)):
        backend.run(_call(mask=mask))
    assert compiled == [MaskSpec(right=0), MaskSpec(left=4, right=4)]
    assert seen["calls"] == 3 and seen["window_size"] == (4, 4) and not seen["causal"]


def test_flash_attn_4_that_fails_to_compile_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(q: Tensor) -> Any:
        raise AssertionError("no such tile")

    _package(monkeypatch, "flash_attn.cute", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    with pytest.raises(CompileError, match=r'attention_backend\("-flash-attn-4"\)') as caught:
        flash_attn.FlashAttention4().run(_call())
    assert "no such tile" in str(caught.value.__cause__)
