"""TransformerEngine's PyTorch modules and functions under their own names: `transformer_engine.pytorch`.

from powertrain.compat.transformer_engine import pytorch as te
"""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine import common, pytorch
from powertrain.compat.transformer_engine.pytorch import DotProductAttention, destroy_ub, initialize_ub

# the release whose names and arguments these modules have
__version__ = "2.20.2"

__all__ = ["DotProductAttention", "common", "destroy_ub", "initialize_ub", "pytorch"]

__getattr__ = unknown(__name__)
