"""`python scripts/kernel_hashes.py [--arch 90 ...] [--dtype bf16 ...] [--keys] > FILE`: a hash of every kernel's PTX.

A change that only moves or renames must leave the output as it was: run it before and after, and compare the files.
One line a specialization: kernel, arch, hash; sorted, so that renamed arguments do not change the order. Names of
kernels and functions are taken out of the PTX first. `--keys` prints the compile service's keys instead, which needs no
compiler: equal keys mean equal source, and so equal PTX.
"""

import argparse
import hashlib
import re
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from powertrain.runtime.compile import prebuild
from tests.runtime.test_cross_compile import specs_for

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def without_names(ptx: str, kernel: str) -> str:
    """PTX less comments, debug information, and names that are ours."""
    ptx = re.sub(r"//.*|^\s*\.(file|loc|section)\b.*", "", ptx, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", ptx.replace(kernel, "kernel"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    options = parser.parse_args()
    specs = [spec for arch in options.arch for dtype in options.dtype for spec in specs_for(arch, DTYPES[dtype])]
    specs = [spec for spec in specs if options.only in spec.kernel.name]
    if options.keys:
        print("\n".join(sorted(f"{spec.kernel.name} sm_{spec.arch} {spec.key}" for spec in specs)))
        return 0
    report = prebuild.build(specs)
    for name, error in report.failures.items():
        print(f"{name}: {error}", file=sys.stderr)
    rows = []
    for entry in report.entries:
        kernel, arch = entry.manifest["kernel"], entry.manifest["arch"]
        text = without_names(zlib.decompress(entry.members["ptx"]).decode(), kernel)
        rows.append(f"{kernel} sm_{arch} {hashlib.sha256(text.encode()).hexdigest()}")
    print("\n".join(sorted(rows)))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
