"""Whether float32 matrix products may use TF32.

PyTorch has two ways to say so: torch.set_float32_matmul_precision, with its alias allow_tf32, and from 2.9 on
torch.backends.cuda.matmul.fp32_precision, with its default torch.backends.fp32_precision. The getters of the older way
raise once the newer one says something else. What either says arrives in the newer one, whose getter does not raise.
"""

import torch

fp32_precision = torch._C._get_fp32_precision_getter  # (backend, op) -> "ieee", "tf32", "bf16" or "none"


def allows_tf32() -> bool:
    """PyTorch's settings allow TF32 in products of float32 on a GPU."""
    return fp32_precision("cuda", "matmul") == "tf32"


# under torch.compile, which cannot trace the getter; a changed setting compiles again
allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
