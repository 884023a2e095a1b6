"""Registration of all ops with PyTorch, for exported programs, which call them by name."""

import pkgutil
from importlib import import_module

import powertrain.ops


def register_ops() -> None:
    """Register every op with PyTorch, which otherwise happens when a function of ours is first used.

    A program that torch.export has saved calls ops by name, so that a process that only loads it needs this first:

        powertrain.register_ops()
        program = torch.export.load("model.pt2")
    """
    for module in pkgutil.walk_packages(powertrain.ops.__path__, "powertrain.ops."):
        import_module(module.name)
