"""`python -m benchmarks OP...` runs benchmarks/ops/ for each op and prints the tables with the machine they come from.

OP is a public name (rms_norm) or the name of a file there (norm).
"""

import importlib
import subprocess
import sys
from pathlib import Path

import torch
import triton

import powertrain
from benchmarks import ahead, peers


def _file_of(op: str) -> str:
    if (Path(__file__).parent / "ops" / f"{op}.py").exists():
        return op
    return powertrain._PUBLIC.get(op, op).rpartition(".")[2]


def main(ops: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU; none is visible here")
    peers.set_up_torch_compile()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, commit {commit or 'unknown'}")
    modules = [importlib.import_module(f"benchmarks.ops.{op}") for op in dict.fromkeys(map(_file_of, ops))]
    print(ahead.build(module.launch for module in modules if hasattr(module, "launch")), flush=True)
    for module in modules:
        for lines in module.run():
            print(lines, flush=True)
            print()


if __name__ == "__main__":
    main(sys.argv[1:])
