"""Every op's kernels, in their default configuration, compiled for every supported arch without a GPU.

What they use is checked against the arch's limits and against the table beside this file. After a change that is meant
to change it: `python -m tests.runtime.test_cross_compile` writes it anew.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import powertrain
from powertrain import ops
from powertrain.ops.attention.backends.zero_padding import zero_tail
from powertrain.ops.cases import cases
from powertrain.ops.gemm.odd_widths import padded_linear
from powertrain.ops.linear_log_probs import Teacher
from powertrain.ops.rope_table import RopeTable
from powertrain.parallel.transport.kernels import poison, sum_parts
from powertrain.runtime import float32_products
from powertrain.runtime.compile import prebuild
from powertrain.runtime.compile.service import Spec
from powertrain.runtime.compile.triton_compat import VERSION_TEXT
from powertrain.runtime.launch import Kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.ops.attention.attention_launches import (
    launch_all_features,
    launch_attention_kernels,
    launch_hopper_attention,
    launch_masks,
)
from tests.ops.attention.decode_launches import launch_decode_kernels, launch_merge_kernels
from tests.ops.fp8_launches import launch_fp8_kernels
from tests.ops.gemm_launches import launch_epilogues, launch_fp8_gemms, launch_gathered, launch_gemms

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
# in every run; the others in `make test-full`: with an empty store an arch takes 16 CPU seconds, with attention several
# times that
OFTEN = (80, 90)
ATTENTION_ARCHS = (90,)
TABLE = Path(__file__).with_name("resources.json")
pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


META = torch.device("meta")
SpecsOf = Callable[[int], list[Spec]]


def _beyond_the_catalog(dtype: torch.dtype) -> None:
    """Kernels that the catalog's sizes do not reach: rows too long for one block, the optimizer, gradients by parts,
    decoding and merging, dense GEMMs on sm_90, tails."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)

    powertrain.layer_norm(empty(64, 20000), empty(20000), empty(20000), residual=empty(64, 20000))[0].backward(
        torch.empty(64, 20000, dtype=dtype, device=META)
    )
    powertrain.layer_norm(empty(64, 40000), empty(40000), empty(40000), residual=empty(64, 40000))[0].backward(
        torch.empty(64, 40000, dtype=dtype, device=META)
    )
    for norm in (powertrain.rms_norm, powertrain.layer_norm):
        norm(empty(64, 20000), empty(20000))
    _launch_few_tokens_to_experts(empty)
    _launch_few_rows_of_a_long_vocabulary(empty)
    scores = powertrain.scaled_softmax(empty(4, 64, 40000))
    scores.backward(torch.empty_like(scores))
    main_grad = torch.empty(512, 64, device=META)
    target = torch.empty(128, dtype=torch.int64, device=META)
    powertrain.linear_cross_entropy(empty(128, 64), empty(512, 64), target, main_grad=main_grad).backward()
    parameters = [torch.nn.Parameter(empty(3000)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    powertrain.clip_grad_norm_(parameters, 1.0)
    powertrain.AdamW(parameters).step()
    powertrain.AdamW(parameters).step(max_norm=1.0)
    table = RopeTable(*(torch.empty(64, 32, device=META) for _ in range(2)))
    powertrain.rope(torch.empty(2, 64, 8, 128, dtype=dtype, device=META), table=table, inplace=True)
    launch_decode_kernels(dtype)
    launch_merge_kernels(dtype)
    if dtype is not torch.float32:
        odd = padded_linear(empty(128, 64), empty(171, 64), empty(171), 176)
        narrow = padded_linear(odd, empty(64, 171), None, 64)
        narrow.backward(torch.empty_like(narrow))
    if dtype is not torch.float32 and Target.of(META).arch == 90:
        launch_gemms(dtype)
        launch_epilogues(dtype)
        launch_gathered(dtype)
        launch_hopper_attention(dtype)
    if Target.of(META).has_fp8:
        launch_fp8_kernels(dtype)
        if Target.of(META).arch == 90 and dtype is torch.bfloat16:
            launch_fp8_gemms()
    parts = torch.empty(4, 64, 128, dtype=dtype, device=META)
    sum_parts(parts)
    sum_parts(parts, torch.empty(128, dtype=dtype, device=META))
    poison(parts, torch.empty(1, dtype=torch.int32, device=META))
    zero_tail(torch.empty(64, 4, 64, dtype=dtype, device=META), torch.empty(3, dtype=torch.int32, device=META))


def _launch_few_tokens_to_experts(empty: Callable[..., torch.Tensor]) -> None:
    experts = torch.empty(4, 6, dtype=torch.int32, device=META)
    rows, offsets, positions = powertrain.moe_permute(empty(4, 2048), experts, 64)
    powertrain.moe_unpermute(rows, positions, empty(4, 6))
    # tiles of 64 and of 128 columns
    for features in (256, 2816):
        powertrain.grouped_gemm(rows, empty(64, features, 2048), offsets)


def _launch_few_rows_of_a_long_vocabulary(empty: Callable[..., torch.Tensor]) -> None:
    target = torch.empty(4, dtype=torch.int64, device=META)
    # rows of whole vectors, and others
    for V in (128256, 100277):
        for smoothing in (0.0, 0.1):
            powertrain.cross_entropy(empty(4, V), target, label_smoothing=smoothing).backward()
    for entropy in (False, True):
        powertrain.linear_log_probs(empty(4, 64), empty(128256, 64), target, entropy=entropy)
    teacher = Teacher(empty(4, 64), empty(32000, 64), beta=0.5)
    powertrain.linear_log_probs(empty(4, 64), empty(32000, 64), target, teacher=teacher)


def specs_for(arch: int, dtype: torch.dtype = torch.bfloat16, *, attention: bool = True) -> list[Spec]:
    """What one forward and backward of every case at its full size launches on `arch`, and the rest."""
    with record(f"sm_{arch}") as wanted, powertrain.attention_backend("triton"):
        for case in cases():
            if attention or case.op not in ("attention", "varlen_attention"):
                case.step(case.inputs(case.full, dtype, META))
        _beyond_the_catalog(dtype)
        if attention:
            launch_attention_kernels(dtype)
            launch_masks(dtype)
    return wanted.specs


def _name(spec: Spec) -> str:
    # of a tensor map dtype and tile, from which its layout follows
    given = {name: t.partition(",NVMMA")[0] for name, t in spec.signature.items() if t != "constexpr"}
    types = ",".join(f"{name.removesuffix('_ptr')}:{t}" for name, t in given.items())
    constants = ",".join(f"{k}={v}" for k, v in spec.constants.items() if v is not None)
    options = ",".join(f"{k}={v}" for k, v in spec.options.items())
    aligned = ",".join(name.removesuffix("_ptr") for name in spec.alignment)
    return f"{spec.kernel.name}[{types}][{constants}][{options}][{aligned}]"


def measure(archs: tuple[int, ...], specs_of: SpecsOf = specs_for) -> dict[str, dict[str, list[int]]]:
    """kernel specialization -> arch -> [registers, stack bytes, shared bytes]."""
    specs = [spec for arch in archs for spec in specs_of(arch)]
    names = {spec.key: (_name(spec), f"sm_{spec.arch}") for spec in specs}
    report = prebuild.build(specs)
    assert not report.failures, report.failures
    found: dict[str, dict[str, list[int]]] = {}
    assert len(set(names.values())) == len(names), "two specializations share a name"
    for entry in report.entries:
        name, arch = names[entry.key]
        facts = entry.manifest["launch"]
        found.setdefault(name, {})[arch] = [facts["registers"], facts["stack"], facts["shared"]]
        target = Target.parse(arch)
        assert facts["shared"] <= target.shared_per_block, (name, arch, facts)
        assert facts["registers"] * facts["num_warps"] * 32 <= target.registers_per_sm, (name, arch, facts)
    return found


def _spills(found: dict[str, dict[str, list[int]]], most: int = 64) -> dict[tuple[str, str], list[int]]:
    """What spills more than `most` bytes. Attention's tiles and the FP8 product for sm_90 were timed, and spill where
    that was fastest; those for sm_100 and sm_103 spill 152 bytes with documents, as the table says of bf16, and 168 in
    fp16; layers of more than 16384 columns were timed too, which spill up to 176 in 16 bits."""
    wide_layer = "[IS_LAYER=True", "BLOCK_N=16384,BLOCK_TAIL=4096"
    return {
        (name, arch): facts
        for name, archs in found.items()
        for arch, facts in archs.items()
        if facts[1] > (168 if arch in ("sm_100", "sm_103") and name.startswith("_attention_") else most)
        and not (arch == "sm_90" and name.startswith(("_attention_", "_hopper_attention_", "_fp8_hopper_kernel")))
        and not (facts[1] <= 176 and name.startswith("_norm_bwd_kernel") and all(part in name for part in wide_layer))
    }


def _check(found: dict[str, dict[str, list[int]]]) -> None:
    table = json.loads(TABLE.read_text())
    expected = table["specializations"]
    if VERSION_TEXT != table["triton"]:
        # another compiler, other numbers: then only that nothing spills much
        assert not _spills(found)
        return
    worse = []
    for name, archs in found.items():
        for arch, (registers, stack, shared) in archs.items():
            if name not in expected or arch not in expected[name]:
                worse.append(f"{name} {arch}: not in the table")
                continue
            was = expected[name][arch]
            if registers > was[0] + 8 or stack > was[1] or shared > was[2]:
                worse.append(f"{name} {arch}: [registers, stack, shared] {[registers, stack, shared]}, was {was}")
    assert not worse, "\n".join(worse)


def test_no_kernel_is_left_out() -> None:
    names = [m.name for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    names.append("powertrain.parallel.transport.kernels")
    modules = (importlib.import_module(name) for name in names)
    every = {value.name for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    # the row-invariant kernel serves where the Hopper GEMM does not
    recorded = {spec.kernel.name for arch in (80, 90) for spec in specs_for(arch)}
    assert recorded == every


def test_default_configurations() -> None:
    _check(measure(OFTEN, lambda arch: specs_for(arch, attention=arch in ATTENTION_ARCHS)))


@pytest.mark.slow
def test_default_configurations_for_every_arch() -> None:
    _check(measure(ARCHS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_other_dtypes_fit_every_arch(dtype: torch.dtype) -> None:
    assert not _spills(measure(ARCHS, lambda arch: specs_for(arch, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_attention_fits_every_arch_with_every_feature(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "tf32":
        monkeypatch.setattr(float32_products, "fp32_precision", lambda backend, op: "tf32")

    def specs(arch: int) -> list[Spec]:
        with record(f"sm_{arch}") as wanted:
            launch_all_features(torch.bfloat16 if precision == "bf16" else torch.float32)
        return wanted.specs

    spills = _spills(measure(ARCHS, specs), 128)
    # document masks before tcgen05: the tile that does not spill has too few keys for it
    assert all("_attention_dkdv" in name and arch in ("sm_100", "sm_103") for name, arch in spills), spills


if __name__ == "__main__":
    rows = measure(ARCHS)
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
    TABLE.write_text(f'{{"triton": "{VERSION_TEXT}", "specializations": {{\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{TABLE}: {len(rows)} specializations")
