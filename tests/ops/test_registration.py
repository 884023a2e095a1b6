"""Ops registered by name, for programs that torch.export has saved."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import powertrain
from tests.torch_setup import INTERPRET

OPS = Path(powertrain.__file__).parent / "ops"
SCRIPT = """
import torch, powertrain
names = lambda: {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("powertrain::")}
before = names()
powertrain.register_ops()
print(*sorted(before), "|", *sorted(names()))
"""


@pytest.mark.skipif(INTERPRET, reason="launches nothing: the same as in the run on the CPU")
def test_all_ops_are_registered() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    before, after = (part.split() for part in found.split("|"))
    written = re.findall(r"= Op\(\s*f?\"(\w+)\(", "\n".join(path.read_text() for path in OPS.rglob("*.py")))
    assert not before and len(written) > 40
    assert set(written) <= set(after)
