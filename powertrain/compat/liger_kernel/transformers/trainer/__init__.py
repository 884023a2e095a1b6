"""liger_kernel.transformers.trainer."""

from powertrain.compat.liger_kernel.transformers.trainer.orpo_trainer import LigerORPOTrainer
from powertrain.compat.missing import unknown

__all__ = ["LigerORPOTrainer"]
__getattr__ = unknown(__name__)
