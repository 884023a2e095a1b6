"""`python scripts/support_matrix.py`: write docs/support.md: which kernels serve each op, by GPU arch and dtype.

Every op's first case of powertrain/ops/cases takes a forward and a backward on meta tensors inside `powertrain.record`,
for each arch and dtype; a cell tells what would be launched. tests/test_docs.py fails where the page is not current.
"""

from pathlib import Path

import torch

import powertrain
from powertrain.ops.cases import Case, cases
from powertrain.runtime.compile.triton_compat import is_gluon
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
ARCHS = (75, 80, 86, 89, 90, 100, 103, 120, 121)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

HEAD = """\
# Support matrix

Made by `python scripts/support_matrix.py` from the code; a test compares it. Forward and backward of each op on a GPU
of each architecture: *T* stands for our Triton kernels, *G* for our Gluon kernels for Hopper, *-* for neither: plain
PyTorch. Three letters are float32, float16 and bfloat16; one letter stands for all three. On a CPU every op is plain
PyTorch, in all three dtypes.

"""
TAIL = """
- **Attention** is shown for our own kernels; where cuDNN's or flash-attention's is faster it is chosen before them:
  [attention](attention.md), `powertrain explain attention --arch H100`.
- **bfloat16 on sm_75**: the GPU has no arithmetic for it. Kernels convert to float32, and products run without tensor
  cores; float16 is faster there.
- **Matrix products** of `linear_activation` are cuBLAS's, on Hopper our own kernel where it was measured faster
  ([Hopper](hopper.md)); `AdamW` and `clip_grad_norm_` are Triton on every GPU; `decode_attention` follows attention.
- **float8**: `fp8_linear` and `powertrain.quant`, from sm_89 on ([FP8](fp8.md)); products are PyTorch's where it
  has their form, on Hopper our own kernel's where it was measured faster, else our Triton kernel's. Before sm_89 and on
  CPUs the numerics are emulated.
- **Jetson Thor** (sm_110): the ptxas that comes with Triton 3.6 does not know it. With CUDA 13's
  (`TRITON_PTXAS_BLACKWELL_PATH=/usr/local/cuda-13.0/bin/ptxas`) kernels compile for it; none has run there.

| arch | cards | bfloat16 | float8 in hardware | tensor memory accelerator |
|---|---|---|---|---|
"""


def kernels(case: Case, arch: int, dtype: torch.dtype) -> str:
    """T, G or -: what a forward and a backward would launch."""
    # the choice must not depend on what is installed where this runs
    with record(f"sm_{arch}") as recording, powertrain.attention_backend("hopper", "triton"):
        case.step(case.inputs(case.full, dtype, torch.device("meta")))
    return "G" if any(is_gluon(spec.kernel.jit) for spec in recording.specs) else "T" if len(recording) else "-"


def cell(case: Case, arch: int) -> str:
    letters = [kernels(case, arch, dtype) for dtype in DTYPES.values()]
    return letters[0] if len(set(letters)) == 1 else " ".join(letters)


def page() -> str:
    firsts = {case.op: case for case in reversed(cases())}
    lines = ["| op | " + " | ".join(f"sm_{arch}" for arch in ARCHS) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    for op in sorted(firsts):
        lines.append(f"| `{op}` | " + " | ".join(cell(firsts[op], arch) for arch in ARCHS) + " |")
    return HEAD + "\n".join(lines) + "\n" + TAIL + "\n".join(_arch(arch) for arch in ARCHS) + "\n"


def _arch(arch: int) -> str:
    target = Target.parse(f"sm_{arch}")
    answers = ("yes" if has else "no" for has in (target.has_bf16, target.has_fp8, target.has_tma))
    return f"| sm_{arch} | {CARDS[arch]} | {' | '.join(answers)} |"


CARDS = {
    75: "T4, RTX 20", 80: "A100, A30", 86: "RTX 30, A10, A40", 89: "RTX 40, L4, L40S", 90: "H100, H200, GH200",
    100: "B200, GB200", 103: "B300, GB300", 120: "RTX 50, RTX PRO 6000 Blackwell",
    121: "DGX Spark (GB10)",
}  # fmt: skip

if __name__ == "__main__":
    PAGE.write_text(page())
