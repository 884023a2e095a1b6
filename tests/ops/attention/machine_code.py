"""Instructions of Hopper kernels counted in their machine code: nvdisasm takes 0.4 s of a kernel, this a millisecond.

tests/ops/attention/test_hopper_backward.py compares both.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import triton

from powertrain.doctor.elf import sections

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


# by nvdisasm -hex: the lowest 9 bits; those above say what kind of operands an instruction has
_OPERATIONS = {"HGMMA": 0x1F0, "PRMT": 0x016, "UTMAREDG": 0x1B6}
_WARPGROUP = 0x1C5


def instructions(cubin: bytes) -> dict[str, int]:
    """How often these and WARPGROUP.DEPBAR occur."""
    found = dict.fromkeys([*_OPERATIONS, "WARPGROUP.DEPBAR"], 0)
    for section in sections(cubin):  # type: ignore[arg-type]
        if section.name.startswith(b".text."):
            # 16 bytes each
            words = np.frombuffer(cubin, "<u8", section.size // 8, section.offset).reshape(-1, 2)
            operation = words[:, 0] & 0x1FF
            for name, number in _OPERATIONS.items():
                found[name] += int((operation == number).sum())
            # the other instruction of a warpgroup is ARRIVE
            found["WARPGROUP.DEPBAR"] += int(((operation == _WARPGROUP) & (words[:, 1] >> 16 & 1 == 1)).sum())
    return found


def disassembled(cubin: bytes, folder: Path) -> Counter[str]:
    """How often each instruction occurs, by nvdisasm."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([NVDISASM, "-c", "-ndf", path], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(\w+(?:\.DEPBAR)?)", text, re.MULTILINE))
