"""The warm path, on a machine without a GPU: meta tensors and a driver that only remembers."""

import ctypes
import re
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import powertrain
from powertrain.runtime import driver, recording, tracing
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile.backward_ahead import backward_ahead
from powertrain.runtime.errors import WarmUpFirst
from powertrain.runtime.launch import Kernel, Loaded, kernel
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.runtime.kernels import _twice_kernel, spec_of

native = pytest.mark.skipif(settings().interpret, reason="the warm path is that of compiled kernels")
FACTS = {"name": "k", "num_warps": 4, "shared": 512, "global_scratch": 0, "profile_scratch": 0}


def _make(down_to: int = 8) -> Kernel:
    @kernel(aligned=("N",), down_to=down_to)
    def _sample_kernel(x_ptr, b_ptr, y_ptr, M, N, stride_xm, scale, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        pass

    return _sample_kernel


class Driver:
    """Stands in for libcuda behind a kernel's warm path; tensors on meta are "on device -1"."""

    def __init__(self, launched: Kernel, code: int = 0) -> None:
        self.calls: list[tuple] = []
        self.prepared: list[tuple] = []
        self.code = code
        namespace = launched.launch.__globals__
        namespace["launch_kernel"] = lambda: self.launch
        namespace["current_device"] = lambda: -1
        namespace["current_stream"] = lambda device: 77
        namespace["prepare"] = self.prepare
        self.kernel = launched

    def prepare(self, grid, key, values, constants) -> None:
        self.prepared.append((grid, key, values, constants))
        if key is not None and 0 not in grid:
            spec = self.kernel.specialize(values, constants, 90)
            types = [t for name, t in spec.signature.items() if name in self.kernel.arguments]
            loaded = Loaded(types, FACTS, driver.Function(1234, 0))
            self.kernel._tables.setdefault(-1, {})[key] = loaded

    def launch(self, handle, gx, gy, gz, bx, by, bz, shared, stream, params, extra) -> int:
        self.calls.append((handle, (gx, gy, gz), bx, shared, stream, params))
        return self.code


def _arguments(address: int, types: str) -> list:
    """What the driver would read: the values behind the pointer array."""
    pointers = (ctypes.c_void_p * len(types)).from_address(address)
    return [struct.unpack(t, ctypes.string_at(p, struct.calcsize(t)))[0] for p, t in zip(pointers, types, strict=True)]


def _call(launched: Kernel, M: int = 5, N: int = 32, scale: float = 0.5, b: object = None, grid: tuple = (7,)) -> None:
    x = torch.empty(4, 4, device="meta")
    launched[grid](x, b, x, M, N, 64, scale, FLAG=True, BLOCK=16, num_warps=8)


@native
def test_arguments_reach_the_driver() -> None:
    launched = _make()
    fake = Driver(launched)
    _call(launched)
    _call(launched, M=9, grid=(3, 2))
    assert len(fake.prepared) == 1 and len(fake.calls) == 1
    handle, grid, threads, shared, stream, params = fake.calls[0]
    assert (handle, grid, threads, shared, stream) == (1234, (3, 2, 1), 128, 512, 77)
    # x, (b is None and so no parameter), y, M, N, stride, scale, two scratch pointers
    assert _arguments(params, "QQiiifQQ") == [0, 0, 9, 32, 64, 0.5, 0, 0]


@native
def test_parameters_may_be_named_as_the_launcher_names_things() -> None:
    @kernel()
    def _named_kernel(slot_ptr, slot, key, device, loaded, code, buffer, pointers, scratch, gx, kept):
        pass

    fake = Driver(_named_kernel)
    x = torch.empty(4, device="meta")
    for _ in range(2):
        _named_kernel[(7,)](x, *range(1, 11))
    assert len(fake.prepared) == len(fake.calls) == 1
    assert _arguments(fake.calls[0][-1], "Q" + 10 * "i" + "QQ") == [0, *range(1, 11), 0, 0]


@pytest.mark.parametrize("warps", [0, 3, 6])
def test_warps_that_are_no_power_of_two_are_refused_by_the_interpreter_too(warps: int) -> None:
    x = torch.empty(4, 4, device="meta")
    with pytest.raises(ValueError, match=rf"num_warps must be a power of 2, got {warps}"):
        _make()[(7,)](x, None, x, 5, 32, 64, 0.5, FLAG=True, BLOCK=16, num_warps=warps)


def test_names_that_a_launch_needs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"_taken_kernel: parameters may not be named grid, _own"):

        @kernel()
        def _taken_kernel(x_ptr, grid, _own):
            pass


@native
def test_sizes_never_specialize_and_multiples_of_16_do() -> None:
    launched = _make()
    fake = Driver(launched)
    for M in (1, 2, 16, 4096):
        _call(launched, M=M)
    assert len(fake.prepared) == 1
    _call(launched, N=33)
    _call(launched, N=35)
    assert len(fake.prepared) == 2


@native
def test_smaller_powers_of_two_specialize_where_asked() -> None:
    launched = _make(down_to=2)
    fake = Driver(launched)
    # two of each step: 32, 8, 4, 2, 1 (the row stride is 64)
    for N in (32, 48, 8, 24, 4, 12, 2, 2614, 1, 97):
        _call(launched, N=N)
    assert len(fake.prepared) == 5
    steps = [launched.specialize(values, constants, 90).aligned for _, _, values, constants in fake.prepared]
    pointers = {"x_ptr": 16, "y_ptr": 16}
    assert steps == [pointers | dict(N=n, stride_xm=n) for n in (16, 8, 4, 2)] + [pointers]
    # without it multiples of 4 and 2 are those of any number
    assert _make().specialize(*fake.prepared[1][2:], 90).aligned == pointers | dict(N=8, stride_xm=8)
    assert _make().specialize(*fake.prepared[2][2:], 90).aligned == pointers


@native
def test_rows_are_loaded_in_the_widest_vectors_that_their_width_allows() -> None:
    """Of bfloat16: 16 bytes for multiples of 8, 8 of 4, 4 of 2."""
    loads = []
    for N in (96, 104, 100, 98, 97):
        x, weight = (torch.empty(*s, N, dtype=torch.bfloat16, device="meta") for s in ((1000,), ()))
        with recording.record("sm_90") as wanted:
            powertrain.rms_norm(x, weight)
        (spec,) = wanted.specs
        ptx = zlib.decompress(compile_service.entry_for(spec)[0].members["ptx"]).decode()
        loads.append(re.findall(r"ld\.global\.(?:v(\d)\.)?b(\d+)", ptx))
    widths = [max(int(vector or 1) * int(bits) // 8 for vector, bits in some) for some in loads]
    assert widths == [16, 16, 8, 4, 2], loads


def _attention_launches(head_dim: int, backend: str) -> list[compile_service.Spec]:
    query, key = (torch.empty(2, 300, n, head_dim, dtype=torch.bfloat16, device="meta") for n in (4, 2))
    tensors = [x.requires_grad_() for x in (query, key, key.clone())]
    with recording.record("sm_90") as wanted:
        out = powertrain.attention(*tensors, is_causal=True, backend=backend)
        torch.autograd.grad(out, tensors, torch.empty_like(out))
    return list(wanted.specs)


@native
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_heads_of_an_odd_number_of_16_bytes_are_read_and_stored_like_others(backend: str) -> None:
    """The strides of heads of 184 bfloat16 are multiples of 8, not of 16: 16 bytes an instruction all the same."""
    widths = []
    for head_dim in (192, 184):
        accesses = []
        for spec in _attention_launches(head_dim, backend):
            ptx = zlib.decompress(compile_service.entry_for(spec)[0].members["ptx"]).decode()
            found = set(re.findall(r"(ld|st)\.global\.(?:v(\d)\.)?b(\d+)", ptx))
            accesses.append((spec.kernel.name, found))
        widths.append(accesses)
    assert widths[0] == widths[1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_misaligned_tensors_share_their_step(device: str) -> None:
    memory = torch.empty(64, dtype=torch.bfloat16, device=device)
    values = dict(x_ptr=memory[2:], b_ptr=None, y_ptr=memory[8:], M=1, N=16, stride_xm=16, scale=1.0)
    constants = dict(FLAG=True, BLOCK=16, num_warps=4, num_stages=3, maxnreg=None)
    rows = {"N": 16, "stride_xm": 16}
    assert _make(down_to=2).specialize(values, constants, 90).aligned == {"x_ptr": 4, "y_ptr": 4} | rows
    assert _make().specialize(values, constants, 90).aligned == rows


@native
def test_large_integers_leave_the_warm_path() -> None:
    launched = _make()
    fake = Driver(launched)
    _call(launched)
    _call(launched, M=2**31)
    assert fake.prepared[-1][1] is None and fake.prepared[-1][2]["M"] == 2**31
    spec = launched.specialize(fake.prepared[-1][2], fake.prepared[-1][3], 90)
    assert [spec.signature[n] for n in ("M", "N", "stride_xm", "scale")] == ["i64", "i64", "i64", "fp32"]


@native
def test_absent_pointers_are_constants() -> None:
    launched = _make()
    fake = Driver(launched)
    _call(launched)
    spec = launched.specialize(*fake.prepared[0][2:], 90)
    assert spec.signature["b_ptr"] == "constexpr" and spec.constants["b_ptr"] is None
    _call(launched, b=torch.empty(2, device="meta", dtype=torch.bfloat16))
    assert len(fake.prepared) == 2


@native
def test_a_refused_launch_is_prepared_again() -> None:
    launched = _make()
    fake = Driver(launched, code=201)
    _call(launched)
    _call(launched)
    assert len(fake.prepared) == 2


@native
def test_threads_never_share_an_argument_buffer() -> None:
    launched = _make()
    seen: list[tuple[int, int]] = []
    barrier = threading.Barrier(4)

    class Slow(Driver):
        def launch(self, *args) -> int:
            barrier.wait(30)  # all four are inside a launch at once
            seen.append((args[9], _arguments(args[9], "QQiiifQQ")[2]))
            return 0

    Slow(launched)
    _call(launched)
    threads = [threading.Thread(target=_call, args=(launched, M)) for M in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({address for address, _ in seen}) == 4 and {M for _, M in seen} == {0, 1, 2, 3}


def test_mixed_devices_are_named() -> None:
    with pytest.raises(ValueError, match="_sample_kernel: all tensors must be on one device, got x on meta, y on cpu"):
        _make()._device({"x_ptr": torch.empty(1, device="meta"), "y_ptr": torch.empty(1)})


@native
def test_cpu_tensors_are_refused() -> None:
    x = torch.empty(4)
    with pytest.raises(ValueError, match="_twice_kernel: tensors must be on a CUDA device, got cpu"):
        _twice_kernel[(1,)](x, x, 4, BLOCK=16)


def test_aligned_names_must_be_arguments() -> None:
    with pytest.raises(TypeError, match="aligned names"):

        @kernel(aligned=("missing",))
        def _k(x_ptr):
            pass


@native
def test_capture_says_warm_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(WarmUpFirst, match=r"_twice_kernel for sm_80 .* CUDA graph"):
        _twice_kernel._load(spec_of(), 0, False)


@native
@pytest.mark.parametrize("reason", ["refused", "driver too old"])
def test_an_image_the_driver_refuses_is_rebuilt_once(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    entry = store_entry()

    def entry_for(spec: object, *, again: bool = False) -> tuple:
        built.append(again)
        return entry, "compiled" if again else "pack"

    def load(image: bytes, *args: object) -> driver.Function:
        if len(built) == 1 and reason == "refused":
            raise driver.ImageError("no")
        return driver.Function(1, 2)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compile_service, "entry_for", entry_for)
    monkeypatch.setattr(driver, "load", load)
    versions = iter([11000, 99000] if reason == "driver too old" else [99000, 99000])
    monkeypatch.setattr(driver, "version", lambda: next(versions))
    tracing.clear()
    assert _twice_kernel._load(spec_of(), 0, False).handle == 1
    assert built == [False, True]
    assert "compiling it here" in tracing.trace()[-1].text


def store_entry() -> SimpleNamespace:
    facts = {**FACTS, "num_warps": 4}
    return SimpleNamespace(members={"cubin": b"x"}, manifest={"launch": facts, "min_driver": 12000})


@native
def test_recording_notes_and_does_not_run() -> None:
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    with recording.record("sm_90") as wanted:
        powertrain.rms_norm(x, torch.empty(64, device="meta", requires_grad=True)).sum().backward()
    names = [spec.kernel.name for spec in wanted.specs]
    assert names == ["_norm_fwd_kernel", "_norm_bwd_kernel", "_column_sums_kernel"]
    assert {spec.arch for spec in wanted.specs} == {90}
    assert Target.of(torch.device("meta")).name == "interpreter", "the recording ended"
    with pytest.raises(RuntimeError, match="cannot be nested"), recording.record("sm_90"), recording.record("sm_80"):
        pass


@native
def test_python_calls_of_one_eager_op() -> None:
    """Python calls of a call that is not replayed; tests/ops/test_replay.py counts those of one that is."""
    from powertrain.ops import norm_fwd_kernels

    x, w = torch.empty(128, 1024, device="meta"), torch.empty(1024, device="meta")
    Driver(norm_fwd_kernels._norm_fwd_kernel)
    try:
        powertrain.rms_norm(x, w)
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        powertrain.rms_norm(x, w)
        sys.setprofile(None)
    finally:
        namespace = norm_fwd_kernels._norm_fwd_kernel.launch.__globals__
        namespace["prepare"] = norm_fwd_kernels._norm_fwd_kernel._prepare
        namespace["current_device"] = lambda: None
        namespace["launch_kernel"] = driver.launcher
        norm_fwd_kernels._norm_fwd_kernel._tables.clear()
    assert calls <= 69, f"{calls} Python calls"


@native
def test_a_backward_is_compiled_beside_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a differentiated call launches, found without memory and compiled in threads of their own."""
    from powertrain.ops.norm import _norm_op

    asked: list[tuple[torch.Tensor | object, ...]] = []
    monkeypatch.setattr(_norm_op, "_compile_backward_ahead", lambda args: asked.append(args))
    x, weight = torch.randn(4, 520, requires_grad=True), torch.ones(520, requires_grad=True)
    powertrain.rms_norm(x, weight)
    assert not asked  # nothing was compiled
    with recording.record("sm_90"):
        meta = powertrain.rms_norm(x.to("meta"), weight.to("meta"))
    assert not asked
    del meta
    monkeypatch.undo()

    arguments = _arguments_of(_norm_op, lambda: powertrain.rms_norm(x.detach().to("meta").requires_grad_(), None))
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target.parse("sm_90")))
    specs = _norm_op._backward_specs(arguments)
    names = {spec.kernel.name for spec in specs}
    assert {"_norm_fwd_kernel", "_norm_bwd_kernel"} <= names
    compile_service.compile_ahead(specs)
    for spec in specs:
        assert compile_service.entry_for(spec)[0].manifest["launch"]["registers"] > 0


@native
def test_a_backward_begins_to_compile_before_the_forward_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a call, with gradients on again, which are off inside the forward of an autograd.Function."""
    from powertrain.ops.norm import _norm_op

    order = []

    class Slow:
        order_worker = staticmethod(lambda: None)

        def compile(self, *given: object, **options: object) -> None:
            order.append("forward")
            raise compile_service.CompileError("never mind")

    def forward(*args: object) -> None:
        for _ in range(2):
            with pytest.raises(compile_service.CompileError), torch.no_grad():
                compile_service.entry_for(spec_of(_twice_kernel), again=True)

    monkeypatch.setattr(compile_service, "service", Slow)
    monkeypatch.setattr(_norm_op, "_compile_backward_ahead", lambda args: order.append("backward"))
    monkeypatch.setattr(_norm_op, "apply", forward)
    x = torch.randn(4, 520, requires_grad=True)
    _norm_op(x, None, None, None, 1e-6, False, False, False)
    assert order == ["backward", "forward", "forward"]
    assert backward_ahead.wanted is None
    # a call without gradients has no backward
    with torch.no_grad(), pytest.raises(compile_service.CompileError):
        compile_service.entry_for(spec_of(_twice_kernel), again=True)
    assert order[3:] == ["forward"]

    monkeypatch.undo()
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target.parse("sm_90")))
    arguments = _arguments_of(_norm_op, lambda: powertrain.rms_norm(x.detach().to("meta").requires_grad_(), None))
    with torch.no_grad():
        names = {spec.kernel.name for spec in _norm_op._backward_specs(arguments)}
    assert "_norm_bwd_kernel" in names


@native
def test_specs_of_a_backward_leave_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing does not see the tensors saved for them, emulation goes on, and results are not taken by row."""
    from powertrain.ops.activations import _activation_op

    x = torch.ones(1 << 16, 8, device="meta", requires_grad=True)
    arguments = _arguments_of(_activation_op, lambda: powertrain.activation(x, "gelu"))
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target.parse("sm_90")))
    looked = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if not looked:
            looked.append(_activation_op._backward_specs(arguments))
        return x.sin().cos()

    value = torch.randn(3, requires_grad=True)
    checkpoint(layer, value, use_reentrant=False).sum().backward()
    torch.testing.assert_close(value.grad, -value.sin().sin() * value.cos())
    assert {spec.kernel.name for spec in looked[0]} == {"_activation_fwd_kernel", "_activation_bwd_kernel"}

    results = []
    monkeypatch.setattr(torch.autograd, "backward", lambda outputs: results.append(len(outputs)))
    _activation_op._backward_specs(arguments)
    assert results == [1]

    with recording.emulate("sm_80"):
        _activation_op._backward_specs(arguments)
        assert recording.state.redirected and recording.state.active
    assert not recording.state.redirected and not recording.state.active


@native
def test_a_backward_is_not_compiled_ahead_beside_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may be waiting for this one, as in a backward that computes a layer again."""
    from powertrain.ops.norm import _norm_op

    asked = []
    monkeypatch.setattr(_norm_op, "_backward_specs", lambda args: asked.append(args) or [])
    with recording.record("sm_90"):
        _norm_op._compile_backward_ahead((1.0,))
    with recording.emulate("sm_80"):
        _norm_op._compile_backward_ahead((1.0,))
    assert not asked
    _norm_op._compile_backward_ahead((1.0,))
    assert asked == [(1.0,)]


def test_no_thread_to_compile_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tracing.clear()
    compile_service.compile_ahead([spec_of(_twice_kernel)])
    assert [event.text.partition(": ")[2] for event in tracing.trace()] == [
        "not compiled ahead: can't start new thread"
    ]


def test_an_ordered_worker_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """POWERTRAIN_JOBS is a limit of memory: while that many workers compile, no other one is started."""
    service = compile_service.Service()
    orders: list[Future] = []
    monkeypatch.setattr(service, "_order", lambda: orders.append(Future()) or orders[-1])
    slots = [service._slots.acquire() for _ in range(service.limit)]
    service.order_worker()
    assert len(slots) == service.limit and not orders
    service._slots.release()
    service.order_worker()
    service.order_worker()
    assert len(orders) == 1
    # the slot that was looked at is free again
    assert service._slots.acquire(blocking=False)


def _arguments_of(op: object, call: object) -> tuple[object, ...]:
    """What a public function gives its op."""
    found: list[tuple[object, ...]] = []
    with recording.record("sm_90"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "apply", lambda *args: (found.append(args), *(None,) * 4)[1:])
        try:
            call()
        except (TypeError, AttributeError):
            pass  # of a result that is None
    return found[0]


_FOUND_AHEAD = """
import sys, torch
import powertrain
from powertrain.runtime import dispatch
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target

class Spy:
    seen = []
    wanted = property(lambda self: None, lambda self, value: value and self.seen.append(value))

dispatch.backward_ahead = Spy()

def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_()

def heads():
    return meta(2, 256, 12, 128)[:, :, :8], *(meta(2, 256, 12, 128)[:, :, first : first + 2] for first in (8, 10))

x, weight = meta(64, 512), meta(512)
with record("sm_90"):
    powertrain.attention(*heads(), is_causal=True)
    powertrain.rms_norm(x, weight, residual=x)
    powertrain.layer_norm(x, weight, weight)
    powertrain.gated_activation(x, "swiglu")
    powertrain.activation(x, "gelu")
    powertrain.bias_dropout_add(x, weight, x, 0.1)
    powertrain.scaled_softmax(x)
    powertrain.rope(heads()[0], table=powertrain.rope_table(128, 256, device="meta"))
    powertrain.cross_entropy(x, torch.zeros(64, dtype=torch.int64, device="meta"))
    powertrain.linear_cross_entropy(x, meta(1024, 512), torch.zeros(64, dtype=torch.int64, device="meta"))
before = {name for name in sys.modules if "sympy" in name}
Target.of = staticmethod(lambda device: Target.parse("sm_90"))
for wanted in Spy.seen:
    assert wanted.func.__self__._backward_specs(*wanted.args)
print(len(Spy.seen), {name for name in sys.modules if "sympy" in name} - before)
"""


@native
def test_to_find_a_backward_ahead_imports_no_sympy() -> None:
    run = subprocess.run([sys.executable, "-c", _FOUND_AHEAD], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split(maxsplit=1) == ["10", "set()\n"]
