"""Version numbers that transformer_engine.pytorch reports."""

import re

import torch

from powertrain.compat.missing import unknown

__all__ = ["get_cudnn_version", "get_device_compute_capability", "torch_version"]


def torch_version() -> tuple[int, ...]:
    """PyTorch's release: (2, 11, 0) of 2.11.0a0+cu130."""
    match = re.match(r"\d+(\.\d+)*", torch.__version__)
    assert match is not None
    return tuple(map(int, match[0].split(".")))


def get_cudnn_version() -> tuple[int, int, int]:
    """cuDNN's (major, minor, patch). Raises RuntimeError where PyTorch has no cuDNN."""
    encoded = torch.backends.cudnn.version()
    if encoded is None:
        raise RuntimeError("get_cudnn_version: PyTorch has no cuDNN here")
    # two digits of the minor version since cuDNN 9
    major, rest = divmod(encoded, 1000 if encoded < 90000 else 10000)
    return (major, *divmod(rest, 100))


def get_device_compute_capability() -> tuple[int, int]:
    """The current GPU's compute capability."""
    return torch.cuda.get_device_capability()


__getattr__ = unknown(__name__)
