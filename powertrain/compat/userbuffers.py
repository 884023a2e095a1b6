"""TransformerEngine's set-up of overlapped tensor parallelism: arguments are checked; no set-up is needed here.

    from powertrain.compat.transformer_engine import destroy_ub, initialize_ub

There a buffer of one shape is made for all layers, before any of them, over `tp_size` consecutive ranks. Here each
layer (powertrain/nn/tensor_parallel/linear.py) gets its group and sends any number of rows; docs/overlap.md has the
table.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from powertrain.parallel.overlap import close_all
from powertrain.runtime import checks, tracing

_OP = "initialize_ub"
# of TransformerEngine's UserBufferQuantizationMode
_MODES = ("NONE", "FP8")
# the products that ub_cfgs may name; each is chosen for here by powertrain/parallel/cost_model.py
_NAMES = tuple(
    # TransformerEngine's names: layers' products, forward, input gradient and weight gradient
    f"{layer}_{product}"
    for layer in ("qkv", "proj", "fc1", "fc2")
    for product in ("fprop", "dgrad", "wgrad")
)


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Check the arguments, and log their effect in one line; makes no buffer and may be called again.

    shape     [tokens, hidden size];  tp_size   ranks of tensor parallelism, which divide all ranks
    ub_cfgs   settings by product (qkv_fprop, fc1_dgrad ...), or one such table for each quantization mode
    use_fp8, quantization_modes   rows of layers that compute in FP8 (`quantize_model`) are sent in FP8; of others
                                  as they are. Both may be called after one initialize_ub: nothing is set here
    Raises ValueError naming the argument.
    """
    # NumPy's integers too
    sizes = list(shape) if isinstance(shape, Sequence) else []
    good = len(sizes) == 2 and all(isinstance(n, Integral) and n > 0 for n in sizes)
    checks.require(good, _OP, "shape", "be [tokens, hidden size], both above 0", sizes or shape)
    # ranks may be checked before torch.distributed is up
    world = dist.get_world_size() if dist.is_initialized() else 1
    checks.require(isinstance(tp_size, Integral), _OP, "tp_size", "be a whole number", tp_size)
    checks.require(tp_size > 0 and world % tp_size == 0, _OP, "tp_size", f"divide the {world} ranks", tp_size)
    checks.require(dtype in checks.FLOATS, _OP, "dtype", "be float32, float16 or bfloat16", dtype)
    # members of TransformerEngine's enum or strings: the library is not imported
    modes = [str(getattr(mode, "name", mode)) for mode in quantization_modes or ()]
    unknown = [mode for mode in modes if mode not in _MODES]
    checks.require(not unknown, _OP, "quantization_modes", f"be of {', '.join(_MODES)}", unknown)
    fp8 = use_fp8 or "FP8" in modes
    names = _checked_names(ub_cfgs)
    unneeded = [f"shape {[int(n) for n in sizes]}"]
    unneeded += [f"ub_cfgs for {', '.join(names)}"] if names else []
    unneeded += [f"bootstrap_backend {bootstrap_backend}"] if bootstrap_backend else []
    unneeded += ["with_cublasmp"] if with_cublasmp else []
    carried = "; rows of layers that quantize_model made FP8 are sent in FP8" if fp8 else ""
    # one line for the job
    if not dist.is_initialized() or dist.get_rank() == 0:
        tracing.progress(
            f"initialize_ub: not needed, since layers of powertrain.nn.tensor_parallel.linear overlap over the group "
            f"of {tp_size} ranks that each is constructed with{carried}; "
            f"arguments without effect: {', '.join(unneeded)}"
        )


def _checked_names(ub_cfgs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> list[str]:
    tables = [ub_cfgs] if isinstance(ub_cfgs, Mapping) else list(ub_cfgs or ())
    names = list(dict.fromkeys(name for table in tables for name in table))
    for name in names:
        checks.require(name in _NAMES, _OP, "ub_cfgs", f"name products among {', '.join(_NAMES)}", name)
    return names


def destroy_ub() -> None:
    """Close the overlaps that layers have opened: their memory is given back, and they are not to be called again."""
    close_all()
