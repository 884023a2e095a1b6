"""xFormers under its own names.

from powertrain.compat.xformers import ops as xops
"""

# before `checkpoint`, whose torch.distributed imports triton: this switches it to its interpreter on request
import powertrain.runtime.compile.triton_compat  # noqa: F401
from powertrain.compat.missing import unknown
from powertrain.compat.xformers.checkpoint import (
    checkpoint,
    get_optimal_checkpoint_policy,
    list_operators,
    selective_checkpoint_wrapper,
)

__version__ = "0.0.35"

__all__ = ["checkpoint", "get_optimal_checkpoint_policy", "list_operators", "selective_checkpoint_wrapper"]

__getattr__ = unknown(__name__)
