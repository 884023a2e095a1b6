"""The libraries that can be stood in for, and the version whose names and arguments ours have."""

from typing import NamedTuple


class Library(NamedTuple):
    distribution: str  # as pip and importlib.metadata know it
    version: str  # of the interface
    modules: dict[str, str]  # top-level module -> ours


LIBRARIES = {
    "flash_attn": Library("flash-attn", "2.8.3", {"flash_attn": "powertrain.compat.flash_attn"}),
    "flash_attn_interface": Library(
        "flash-attn-3", "3.0.0", {"flash_attn_interface": "powertrain.compat.flash_attn_interface"}
    ),
    "xformers": Library("xformers", "0.0.35", {"xformers": "powertrain.compat.xformers"}),
    "transformer_engine": Library(
        "transformer-engine", "2.20.2", {"transformer_engine": "powertrain.compat.transformer_engine"}
    ),
    "apex": Library("apex", "0.1", {"apex": "powertrain.compat.apex", "amp_C": "powertrain.compat.apex.amp_C"}),
    "liger_kernel": Library("liger-kernel", "0.8.5", {"liger_kernel": "powertrain.compat.liger_kernel"}),
}
