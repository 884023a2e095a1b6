"""Every op's kernels, in their default configuration, compiled for every supported arch without a GPU.

What they use is checked against the arch's limits and against the table beside this file. After a change that is meant
to change it: `python -m tests.runtime.test_cross_compile` writes it anew.
"""

import json
from pathlib import Path

import pytest
import torch

from powertrain.ops.catalog import cases
from powertrain.runtime import prebuild
from powertrain.runtime.compile import Spec
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
TABLE = Path(__file__).with_name("resources.json")
pytestmark = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


def specs_for(arch: int, dtype: torch.dtype = torch.bfloat16) -> list[Spec]:
    """What one forward and backward of every case at its full size launches on `arch`."""
    with record(f"sm_{arch}") as wanted:
        for case in cases():
            case.step(case.inputs(case.full, dtype, torch.device("meta")))
    return wanted.specs


def _name(spec: Spec) -> str:
    types = ",".join(t for t in spec.signature.values() if t != "constexpr")
    constants = ",".join(f"{k}={v}" for k, v in spec.constants.items() if v is not None)
    options = ",".join(f"{k}={v}" for k, v in spec.options.items())
    return f"{spec.kernel.name}[{types}][{constants}][{options}]"


def measure(archs: tuple[int, ...]) -> dict[str, dict[str, list[int]]]:
    """kernel specialization -> arch -> [registers, stack bytes, shared bytes]."""
    specs = [spec for arch in archs for spec in specs_for(arch)]
    names = {spec.key: (_name(spec), f"sm_{spec.arch}") for spec in specs}
    report = prebuild.build(specs)
    assert not report.failures, report.failures
    found: dict[str, dict[str, list[int]]] = {}
    for entry in report.entries:
        name, arch = names[entry.key]
        facts = entry.manifest["launch"]
        found.setdefault(name, {})[arch] = [facts["registers"], facts["stack"], facts["shared"]]
        target = Target.parse(arch)
        assert facts["shared"] <= target.shared_per_block, (name, arch, facts)
        assert facts["registers"] * facts["num_warps"] * 32 <= target.registers_per_sm, (name, arch, facts)
    return found


def _check(found: dict[str, dict[str, list[int]]]) -> None:
    expected = json.loads(TABLE.read_text())
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


def test_default_configurations_for_every_arch() -> None:
    _check(measure(ARCHS))


if __name__ == "__main__":
    rows = measure(ARCHS)
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{TABLE}: {len(rows)} specializations")
