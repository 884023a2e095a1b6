"""Every op's kernels, in their default configuration, compiled for every supported arch without a GPU.

What they use is checked against the arch's limits and against the table beside this file. After a change that is meant
to change it: `python -m tests.runtime.test_cross_compile` writes it anew.
"""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import torch

import powertrain
from powertrain import ops
from powertrain.ops.catalog import cases
from powertrain.runtime import prebuild
from powertrain.runtime.compile import Spec
from powertrain.runtime.launch import Kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.runtime.triton_compat import VERSION_TEXT

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
TABLE = Path(__file__).with_name("resources.json")
pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


META = torch.device("meta")


def _beyond_the_catalog(dtype: torch.dtype) -> None:
    """Kernels that the catalog's sizes do not reach: rows too long for one block, the optimizer, gradients by parts."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)

    powertrain.layer_norm(empty(64, 20000), empty(20000), empty(20000), residual=empty(64, 20000))[0].backward(
        torch.empty(64, 20000, dtype=dtype, device=META)
    )
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


def specs_for(arch: int, dtype: torch.dtype = torch.bfloat16) -> list[Spec]:
    """What one forward and backward of every case at its full size launches on `arch`, and the rest."""
    with record(f"sm_{arch}") as wanted:
        for case in cases():
            case.step(case.inputs(case.full, dtype, META))
        _beyond_the_catalog(dtype)
    return wanted.specs


def _name(spec: Spec) -> str:
    types = ",".join(f"{name.removesuffix('_ptr')}:{t}" for name, t in spec.signature.items() if t != "constexpr")
    constants = ",".join(f"{k}={v}" for k, v in spec.constants.items() if v is not None)
    options = ",".join(f"{k}={v}" for k, v in spec.options.items())
    aligned = ",".join(name.removesuffix("_ptr") for name in spec.aligned)
    return f"{spec.kernel.name}[{types}][{constants}][{options}][{aligned}]"


def measure(archs: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> dict[str, dict[str, list[int]]]:
    """kernel specialization -> arch -> [registers, stack bytes, shared bytes]."""
    specs = [spec for arch in archs for spec in specs_for(arch, dtype)]
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


def _check(found: dict[str, dict[str, list[int]]]) -> None:
    table = json.loads(TABLE.read_text())
    expected = table["specializations"]
    if VERSION_TEXT != table["triton"]:
        # another compiler, other numbers: then only that nothing spills much
        assert not {name: archs for name, archs in found.items() if any(facts[1] > 64 for facts in archs.values())}
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
    modules = (importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__))
    every = {value.name for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    assert {spec.kernel.name for spec in specs_for(90)} == every


def test_default_configurations_for_every_arch() -> None:
    _check(measure(ARCHS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_other_dtypes_fit_every_arch(dtype: torch.dtype) -> None:
    found = measure(ARCHS, dtype)
    spills = {(name, arch): facts for name, archs in found.items() for arch, facts in archs.items() if facts[1] > 64}
    assert not spills


if __name__ == "__main__":
    rows = measure(ARCHS)
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
    TABLE.write_text(f'{{"triton": "{VERSION_TEXT}", "specializations": {{\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{TABLE}: {len(rows)} specializations")
