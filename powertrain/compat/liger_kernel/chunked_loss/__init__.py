"""liger_kernel.chunked_loss: losses of preference fine-tuning, reinforcement and distillation from hidden states.

The logits are not in memory; `compiled` and, but for the cosine similarity, `chunk_size` change nothing here.
"""

from powertrain.compat.liger_kernel.chunked_loss.distillation import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
)
from powertrain.compat.liger_kernel.chunked_loss.grpo import LigerFusedLinearGRPOLoss
from powertrain.compat.liger_kernel.chunked_loss.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from powertrain.compat.missing import unknown

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]

__getattr__ = unknown(__name__)
