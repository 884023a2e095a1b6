"""Other libraries' names, computed by Powertrain, for code that is not changed.

    powertrain shim flash_attn,xformers -- python train.py

    import powertrain.shim
    powertrain.shim.install("flash_attn")     # before the first import of flash_attn

`import flash_attn` then gives `powertrain.compat.flash_attn`, the same modules under both names. The libraries stand in
folders on PYTHONPATH, with a distribution's metadata, so that `importlib.metadata` and processes started later
(torchrun,
workers of a DataLoader, multiprocessing) see them too; a Python started with -I or -E does not read PYTHONPATH.
"""

from powertrain.shim.alias import alias
from powertrain.shim.folders import Installed, Shim, install, plan
from powertrain.shim.libraries import LIBRARIES

__all__ = ["LIBRARIES", "Installed", "Shim", "alias", "install", "plan"]
