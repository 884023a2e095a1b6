"""What only a GPU can show: other archs' code run, streams, threads, graphs, devices, memory."""

import threading

import pytest
import torch

import powertrain
from powertrain.ops.cases import Case, cases
from powertrain.runtime import launch, recording
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.errors import WarmUpFirst
from powertrain.testing.numerics import errors
from tests.runtime.kernels import _twice_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_older_archs_ptx_through_the_drivers_jit(case: Case, arch: str) -> None:
    with recording.emulate(arch):
        tensors = case.inputs(case.tiny, torch.bfloat16, CUDA)
        found = errors(case.run, case.plain, case.reference, tensors, slack=case.slack)
    assert all(error.ok for error in found), found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_recording_real_tensors_runs_nothing(case: Case) -> None:
    tensors = case.inputs(case.tiny, torch.bfloat16, CUDA)
    with recording.record() as wanted:
        case.step(tensors)
    with recording.record(torch.cuda.get_device_name()) as foretold:  # none of a few ops, whose products are PyTorch's
        case.step(case.inputs(case.tiny, torch.bfloat16, torch.device("meta")))
    assert bool(wanted.specs) == bool(foretold.specs) and {spec.arch for spec in wanted.specs} <= {_arch()}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_meta_tensors_foretell_what_a_gpu_launches(case: Case) -> None:
    """What prebuild compiles is what the run needs."""
    with recording.record(torch.cuda.get_device_name()) as foretold:
        case.step(case.inputs(case.full, torch.bfloat16, torch.device("meta")))
    with recording.record() as wanted:
        case.step(case.inputs(case.full, torch.bfloat16, CUDA))
    assert {spec.key for spec in wanted.specs} <= {spec.key for spec in foretold.specs}


def _arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _twice(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _twice_kernel[(launch_grid(x),)](x, y, x.numel(), BLOCK=128)
    return y


def launch_grid(x: torch.Tensor) -> int:
    return -(-x.numel() // 128)


def test_the_current_stream_of_the_tensors_device_is_used() -> None:
    x = torch.ones(1 << 20, device=CUDA)
    _twice(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the kernel must queue behind this, and the default stream must not
        y = _twice(x)
        event = torch.cuda.Event()
        event.record(side)
    torch.cuda.current_stream().synchronize()
    assert not event.query()
    side.synchronize()
    assert torch.equal(y, x + x)


def test_a_thread_that_never_touched_cuda() -> None:
    x = torch.ones(1000, device=CUDA)
    _twice(x)
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(_twice(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(y, x + x) for y in results)


def test_many_threads_launch_with_their_own_arguments() -> None:
    xs = [torch.full((1000 + i,), float(i), device=CUDA) for i in range(8)]
    _twice(xs[0])
    wrong: list[int] = []

    def work(x: torch.Tensor) -> None:
        for _ in range(200):
            if not torch.equal(_twice(x), x + x):
                wrong.append(x.numel())

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_unaligned_and_large_arguments() -> None:
    base = torch.randn(1001, device=CUDA)
    assert torch.equal(_twice(base[1:].contiguous()), 2 * base[1:])
    y = torch.empty(1000, device=CUDA)
    _twice_kernel[(8,)](base[1:], y, 1000, BLOCK=128)
    assert torch.equal(y, 2 * base[1:])
    _twice_kernel[(7,)](base, y, 2**40, BLOCK=128)  # int64 sizes: another specialization of the same kernel
    assert torch.equal(y[:896], 2 * base[:896])


def test_capture_without_warm_up_is_refused_and_with_it_works() -> None:
    @launch.kernel()
    def _fresh_kernel(x_ptr, n):
        pass

    x = torch.ones(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmUpFirst, match="_fresh_kernel"), torch.cuda.graph(graph):
        _fresh_kernel[(1,)](x, 4)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_gpu_of_the_machine() -> None:
    for index in range(torch.cuda.device_count()):
        x = torch.randn(64, 256, device=f"cuda:{index}", requires_grad=True)
        with torch.cuda.device(0):  # the current device is another one
            y = powertrain.rms_norm(x)
            y.sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (256,), None, 1e-6))
        assert x.grad is not None and x.grad.device == x.device
    a, b = torch.ones(4, 8, device="cuda:0"), torch.ones(8, device="cuda:1")
    with pytest.raises(ValueError, match="weight must be on x's device cuda:0, got cuda:1"):
        powertrain.rms_norm(a, b)


def test_mixed_devices_are_refused_by_the_launch_itself() -> None:
    x = torch.ones(4, device=CUDA)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        _twice_kernel[(1,)](x, torch.ones(4), 4, BLOCK=16)


def test_batch_sizes_share_three_kernels() -> None:
    """Few rows; small tensors, whose kernels start early; all others."""
    for rows in (33, 1000, 4096):
        powertrain.rms_norm(torch.randn(rows, 512, device=CUDA))
    before = set(compile_service._entries)
    for rows in (1, 2, 16, 100, 300, 2000, 3000, 100000):
        powertrain.rms_norm(torch.randn(rows, 512, device=CUDA))
    assert set(compile_service._entries) == before, "a batch size caused a compile"


def test_memory_of_a_norm_is_its_results() -> None:
    x = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    powertrain.rms_norm(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = powertrain.rms_norm(x)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= y.numel() * 2 + 4 * 4096 + 4096


@pytest.mark.parametrize("broken", ["fwd", "bwd"])
def test_a_kernel_that_cannot_be_compiled_falls_back_as_a_whole(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is backward's: the forward then takes plain PyTorch already."""
    from powertrain.ops import norm, norm_bwd_kernels, norm_fwd_kernels
    from powertrain.runtime import dispatch, settings
    from powertrain.runtime.errors import CompileTimeout

    entry_for = compile_service.entry_for

    def refuse(spec: compile_service.Spec, **options: bool) -> object:
        if broken in spec.kernel.name:
            raise CompileTimeout(f"{spec.describe()} did not compile")
        return entry_for(spec, **options)

    monkeypatch.setattr(compile_service, "entry_for", refuse)
    monkeypatch.setattr(dispatch, "disabled_ops", ())
    monkeypatch.setattr(dispatch, "_holds", [])
    monkeypatch.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    for kernel in (norm_fwd_kernels._norm_fwd_kernel, norm_bwd_kernels._norm_bwd_kernel):
        monkeypatch.setattr(kernel, "_loaded", {})
        kernel._tables.clear()
    monkeypatch.setattr(norm._norm_op, "_compiled_backwards", set())
    settings.reload()
    try:
        x = torch.randn(4, 512, device=CUDA, requires_grad=True)
        y = powertrain.rms_norm(x)
        assert y.grad_fn is not None and "powertrain" not in y.grad_fn.name()
        y.sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (512,), None, 1e-6))
    finally:
        monkeypatch.undo()
        settings.reload()
