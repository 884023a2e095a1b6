"""Versions that do not go together, and libraries that are here twice."""

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine

SHOWN = ("torch", "triton", "transformer-engine", "flash-attn", "xformers", "apex", "deepspeed", "vllm", "numpy")

# pairs of packages that pin each other: their metadata gives the versions they were built and tested with
PINNED_BY = ("torch", "xformers", "vllm", "flash-attn", "transformer-engine-torch", "torchvision", "torchaudio")

# (package, versions, with, versions, symptom, package to install, source)
KNOWN_BAD = (
    ("flash-attn", "<2.1.1", "transformer-engine", ">=1.0", "TransformerEngine takes no flash-attn before 2.1.1",
     "flash-attn>=2.1.1", "TransformerEngine, dot_product_attention/utils.py, FlashAttentionUtils.version_required"),
    ("flash-attn", "==2.6.3", "torch", ">=2.5", "its wheels were built for torch 2.4 and older: undefined symbols",
     "flash-attn>=2.8.3", "https://github.com/Dao-AILab/flash-attention/issues/1832"),
    ("numpy", ">=2", "torch", "<2.3", "torch before 2.3 was built against NumPy 1: 'Numpy is not available'",
     "numpy<2", "https://github.com/pytorch/pytorch/issues/107302"),
    ("nvidia-cudnn-cu12", "==9.10.0.*", "transformer-engine", ">=1.0", "FP8 attention is refused with cuDNN 9.10.0",
     "nvidia-cudnn-cu12>=9.10.1", "TransformerEngine, fused_attn.cpp, nvte_get_fused_attn_backend"),
)  # fmt: skip


def versions(machine: Machine) -> Iterator[Finding]:
    shown = [f"{name} {version}" for name in SHOWN if (version := machine.version(name))]
    if machine.torch_cuda:
        shown.append(f"CUDA {machine.torch_cuda} (torch's)")
    cuda = [name for name in sorted(machine.installed) if re.fullmatch(r"nvidia-(cudnn|nccl)-cu\d+", name)]
    shown += [f"{name} {machine.version(name)}" for name in cuda]
    bad = [*_unmet(machine), *_known_bad(machine), *_two_majors(machine)]
    yield Finding("ok", ", ".join(shown) or "none of the libraries of this field is installed")
    yield from bad


def _unmet(machine: Machine) -> Iterator[Finding]:
    """Requirements of installed packages that the installed versions do not meet."""
    for name in PINNED_BY:
        distribution = machine.installed.get(name)
        for text in (distribution.requires or []) if distribution else []:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            have = machine.version(re.sub(r"[-_.]+", "-", requirement.name).lower())
            if have and not requirement.specifier.contains(have, prereleases=True):
                says = f"{name} {machine.version(name)} needs {requirement.name}{requirement.specifier}, here is {have}"
                fix = f"pip install '{requirement.name}{requirement.specifier}'"
                yield Finding("problem", says, (f"Requires-Dist of {name}: {text}",), fix)


def _known_bad(machine: Machine) -> Iterator[Finding]:
    for name, range_, other, other_range, says, install, source in KNOWN_BAD:
        have, beside = machine.version(name), machine.version(other)
        if have and beside and _within(have, range_) and _within(beside, other_range):
            evidence = (f"{name} {have} with {other} {beside}", f"source: {source}")
            yield Finding("problem", says, evidence, f"pip install '{install}'")


def _within(version: str, range_: str) -> bool:
    return SpecifierSet(range_).contains(version, prereleases=True)


def _two_majors(machine: Machine) -> Iterator[Finding]:
    """nvidia-*-cu12 beside nvidia-*-cu13, and packages that were built for the other one."""
    if machine.torch_cuda is None:
        return
    major = machine.torch_cuda.split(".")[0]
    others = [
        name for name in sorted(machine.installed)
        if (match := re.fullmatch(r"(?:nvidia-[a-z-]+|transformer-engine)-cu(\d+)", name)) and match[1] != major
    ]  # fmt: skip
    if others:
        says = f"packages for another CUDA than torch's {machine.torch_cuda}: {', '.join(others)}"
        fix = f"pip uninstall {' '.join(others)}, then install their cu{major} builds"
        yield Finding("problem", says, tuple(f"{name} {machine.version(name)}" for name in others), fix)


_TWICE = {"cuDNN": "libcudnn.so.*", "the CUDA runtime": "libcudart.so.*", "NCCL": "libnccl.so.*", "cuBLAS": "libcublas.so.*"}  # fmt: skip  # noqa: E501


def twice(machine: Machine) -> Iterator[Finding]:
    """Shared libraries that a process could load from two places, in two versions."""
    clean = True
    for library, pattern in _TWICE.items():
        own, chosen, system = (_first(folders, pattern) for folders in _folders(machine))
        before = _other_versions(chosen, own or system)
        if before:
            clean = False
            says = f"{library} is here in several versions, and LD_LIBRARY_PATH puts {before[0].name} before the others"
            yield Finding("problem", says, _shown(own, chosen, system), "unset LD_LIBRARY_PATH")
        elif _other_versions(own + system, own):
            clean = False
            says = f"{library} is here in several versions; whichever is loaded first serves the whole process"
            fix = "import torch before anything else; uninstall the package or system library that torch does not need"
            yield Finding("warning", says, _shown(own, chosen, system), fix)
    if clean:
        yield Finding("ok", f"{', '.join(_TWICE)}: no process can load two versions")


def _folders(machine: Machine) -> tuple[list[Path], list[Path], list[Path]]:
    """Where libraries are loaded from: installed packages, LD_LIBRARY_PATH, the system's own. A toolkit in
    /usr/local/cuda is none of them unless it is named: compilers look there, torch loads its own."""
    own = [folder for root in machine.packages for folder in (*root.glob("nvidia/*/lib"), root / "torch" / "lib")]
    paths = machine.variables.get("LD_LIBRARY_PATH", "").split(":")
    chosen = [machine.path(part) for part in paths if part]
    system = [machine.path(part) for part in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")]
    return own, chosen, system


def _first(folders: list[Path], pattern: str) -> list[Path]:
    """The library of each folder, as the file it is."""
    matches = (sorted(folder.glob(pattern), key=lambda file: len(file.name))[:1] for folder in folders)
    return list(dict.fromkeys(file.resolve() for files in matches for file in files))


def _other_versions(files: list[Path], than: list[Path]) -> list[Path]:
    """Told by size: a wheel calls its cuDNN libcudnn.so.9 whatever it is, a system's is called libcudnn.so.9.1.0."""
    sizes = {file.stat().st_size for file in than[:1]}
    return [file for file in files if sizes and file.stat().st_size not in sizes]


def _shown(*groups: list[Path]) -> tuple[str, ...]:
    return tuple(str(file) for files in groups for file in files)


CHECKS = (
    Check("versions", "do the installed versions go together?", versions),
    Check("twice", "are there two cuDNNs or CUDA runtimes?", twice),
)
