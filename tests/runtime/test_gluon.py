"""Gluon kernels on the one way of launching, and the machine code of the Hopper GEMM, without a GPU."""

import re
import subprocess
import sys
import zlib
from collections.abc import Callable

import pytest
import torch

from powertrain.ops.gemm.hopper import Plan, _gemm_kernel
from powertrain.runtime import gluon_compat
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile import triton_compat
from powertrain.runtime.compile.service import Spec, entry_for
from powertrain.runtime.errors import CompileError
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.ops.gemm_launches import launch_epilogues, launch_fp8_gemms, launch_gathered, launch_gemms

pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


def _specs(launch: Callable[[], None], arch: str = "sm_90") -> list[Spec]:
    with record(arch) as wanted:
        launch()
    return wanted.specs


def _ptx(launch: Callable[[], None]) -> str:
    [spec] = _specs(launch)
    entry, _ = entry_for(spec)
    facts = entry.manifest["launch"]
    # a consumer that spills has its wgmmas serialised by ptxas
    assert facts["stack"] == 0
    assert facts["num_warps"] == 12
    return zlib.decompress(entry.members["ptx"]).decode()


def _lines(ptx: str, pattern: str) -> list[int]:
    return [number for number, line in enumerate(ptx.splitlines()) if re.search(pattern, line)]


LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global\.mbarrier"
STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta"


def test_this_triton_has_what_the_kernels_use() -> None:
    assert gluon_compat.trouble() is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gluon_compat.hopper, "warpgroup_mma")
    monkeypatch.setattr(gluon_compat, "tma_load", None)
    assert gluon_compat.trouble() == "this Triton's Gluon has no warpgroup_mma, tma_load"


def test_every_gemm_compiles_without_spills() -> None:
    specs = _specs(lambda: launch_gemms(torch.bfloat16))
    assert len(specs) == 8
    for spec in specs:
        entry, _ = entry_for(spec)
        ptx = zlib.decompress(entry.members["ptx"]).decode()
        assert entry.manifest["launch"]["stack"] == 0, spec.constants
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8, spec.constants  # 4 in each consumer
        assert _lines(ptx, LOAD), spec.constants
        added = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add" in ptx
        assert added == spec.constants["ADD"], spec.constants
        assert added != bool(_lines(ptx, STORE)), spec.constants


def test_every_epilogue_compiles_without_spills() -> None:
    specs = _specs(lambda: launch_epilogues(torch.bfloat16))
    assert len(specs) == 4
    for spec in specs:
        entry, _ = entry_for(spec)
        ptx = zlib.decompress(entry.members["ptx"]).decode()
        assert entry.manifest["launch"]["stack"] == 0, spec.constants
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8, spec.constants
        assert _lines(ptx, r"st\.global\.v4"), spec.constants  # results, by whole 16 bytes


def test_every_fp8_gemm_compiles_without_spills() -> None:
    specs = _specs(launch_fp8_gemms)
    assert len(specs) == 3 * 2 * 3 * 2
    for spec in specs:
        entry, _ = entry_for(spec)
        ptx = zlib.decompress(entry.members["ptx"]).decode()
        # a bias beside scales of rows: 12 registers, behind the loop over K
        allowed = 48 if spec.constants["FORM"] == "ends" and spec.constants["BLOCK_N"] == 256 else 0
        assert entry.manifest["launch"]["stack"] <= allowed, spec.constants
        halves = spec.constants["BLOCK_N"] // 128
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32") == 2 * 4 * halves, spec.constants
        asynchronous = bool(_lines(ptx, r"cp\.async\.mbarrier\.arrive\.noinc"))
        assert asynchronous == (spec.constants["FORM"] != "ends"), spec.constants


def test_a_gathered_chunk_is_acquired_then_fenced_then_loaded() -> None:
    ptx = _ptx(launch_gathered)
    acquires, loads = _lines(ptx, r"ld\.acquire\.sys\.global"), _lines(ptx, LOAD)
    fences = _lines(ptx, r"^\s*fence\.proxy\.async; mov")
    assert acquires and len(fences) == 1
    assert max(acquires) < fences[0] < min(loads)
    assert len(loads) == 3  # a's rows there, a's rows here, b


def test_walking_on_from_chunk_to_chunk_survives_the_compiler() -> None:
    """Where the next chunk's tiles begin is carried by a loop and only bounds an inner one; see gluon_compat.kept."""
    ptx = _ptx(launch_gathered)
    carried = re.findall(r"// begin inline asm\n\tmov\.b32 (%r\d+), %r\d+;\n\t// end inline asm", ptx)
    assert len(carried) == 5  # two consumers, the loader, two storers
    for register in carried:
        assert len(re.findall(rf"{register}\b", ptx)) > 1, f"{register} is computed and not used"


def test_other_archs_are_refused_by_name_before_anything_compiles() -> None:
    with pytest.raises(NotImplementedError, match="_gemm_kernel: written for sm_90, asked of sm_80"):
        _specs(launch_gathered, "sm_80")


def test_the_interpreter_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from powertrain.ops.gemm.hopper import _gemm_kernel as k; k[(1,)]()"],
        env={"POWERTRAIN_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert "_gemm_kernel: Gluon has no interpreter; unset POWERTRAIN_INTERPRET" in run.stderr


def test_an_arch_that_ends_the_compiler_ends_only_a_worker() -> None:
    """wgmma asked of sm_80 aborts LLVM: this process must not be the one that asks."""
    [spec] = _specs(launch_gathered)
    other = Spec(spec.kernel, spec.signature, spec.constants, spec.aligned, spec.options, 80)
    with pytest.raises(CompileError, match="_gemm_kernel for sm_80"):
        compile_service.service().compile(other, triton_compat.lower(spec.kernel.jit, spec.signature, spec.constants,
                                                             spec.aligned, spec.options, 90))  # fmt: skip


def test_the_key_follows_the_device_functions_and_their_constants() -> None:
    assert len(_gemm_kernel.source_hash) == 64
    names = {"load", "consume", "store", "_behind", "load_acquire", "stores_landed", "kept"}
    parts: dict[str, str] = {}
    triton_compat._collect(_gemm_kernel.fn, parts)
    assert names <= {name.rpartition(".")[2] for name in parts}


def test_shared_memory_of_the_default_plan_fits() -> None:
    plan = Plan()
    stage = (plan.block_m + plan.block_n) * plan.block_k * 2
    assert plan.stages * stage + plan.block_m * plan.block_n * 2 // plan.split <= 232448
