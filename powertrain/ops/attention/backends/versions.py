"""Versions of the attention software in this process, on which the choice of a backend depends."""

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# distribution -> the module that a call imports
PACKAGES = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
}


@dataclass(frozen=True)
class Installed:
    """Versions of the software that computes attention, and the archs of the GPUs that share this process."""

    torch: tuple[int, int]
    cuda: bool  # PyTorch was built with CUDA
    # the number of torch.backends.cudnn.version()
    cudnn: int  # 91900 for 9.19.0; 0: none
    packages: tuple[tuple[str, str], ...] = ()  # (distribution, version)
    # flash-attn-4 plans every GPU of a process for the first arch it saw
    archs: tuple[int, ...] = ()  # of this process's GPUs, each once

    def version(self, package: str) -> str | None:
        return dict(self.packages).get(package)

    def __str__(self) -> str:
        parts = [f"torch {self.torch[0]}.{self.torch[1]}"]
        parts += [f"cuDNN {cudnn_name(self.cudnn)}"] if self.cudnn else []
        return ", ".join([*parts, *(f"{name} {version}" for name, version in self.packages)])


def cudnn_name(version: int) -> str:
    """ "9.19.0" for 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def version_numbers(software: str, name: str) -> tuple[int, ...]:
    """(9, 19, 0) for "9.19.0". Raises ValueError naming `software` if that is no version."""
    # "9.x" or a typed-in "v9" would otherwise fail later, in int()
    if not re.fullmatch(r"\d+(\.\d+)*", name):
        raise ValueError(f"{software}'s version must be numbers with dots between, got {name!r}")
    return tuple(int(part) for part in name.split("."))


def cudnn_number(name: str) -> int:
    """91900 for "9.19" or "9.19.0"."""
    major, minor, patch = (*version_numbers("cuDNN", name), 0, 0, 0)[:3]
    return major * 10000 + minor * 100 + patch


# the assumed cuDNN where this machine has no CUDA: torch 2.11's wheels bring this cuDNN
USUAL_CUDNN = 91900

_assumed: ContextVar[Installed | None] = ContextVar("assumed", default=None)


def installed() -> Installed:
    """The installed software, or the assumed one."""
    # an assumption lets a CPU machine explain a GPU's choice
    return _assumed.get() or _here()


@contextmanager
def assume(software: Installed) -> Iterator[None]:
    """Context in which backends answer as if this software were installed, for explanations and tests."""
    token = _assumed.set(software)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _here() -> Installed:
    version = torch.__version__.split(".")
    cuda = torch.version.cuda is not None
    return Installed(
        # the rest may be "0a0+git..." and decides nothing
        (int(version[0]), int(version[1])),
        cuda,
        (torch.backends.cudnn.version() or 0) if cuda else 0,
        tuple((name, number) for name, module in PACKAGES.items() if (number := _version_of(name, module))),
        tuple(sorted({_arch(n) for n in range(torch.cuda.device_count())})),
    )


def _arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def _version_of(distribution: str, module: str) -> str | None:
    """The version of a distribution whose module can be found. The modules of flash-attn and flash-attn-4 share a
    folder, so the module alone is not enough."""
    try:
        version = importlib.metadata.version(distribution)
        return version if importlib.util.find_spec(module) is not None else None
    except (importlib.metadata.PackageNotFoundError, ImportError, ValueError, OSError):
        return None


def with_cuda(software: Installed) -> Installed:
    """The same with a CUDA build of this PyTorch and its usual cuDNN, where there is none."""
    if software.cuda:
        return software
    return Installed(software.torch, True, USUAL_CUDNN, software.packages, software.archs)
