"""Incompatible versions of installed libraries, and libraries that are installed twice."""

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

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
    pins = _pins(machine)
    unmet = {
        package: [name for name, requirement in of.items() if not _holds(requirement.specifier, have)]
        for package, of in pins.items()
        if (have := machine.version(package))
    }
    for package, names in unmet.items():
        stay = {name: requirement for name, requirement in pins[package].items() if not unmet.get(name)}
        for name in names:
            requirement = pins[package][name]
            needs, have = f"{requirement.name}{requirement.specifier}", machine.version(package)
            message = f"{name} {machine.version(name)} needs {needs}, here is {have}"
            after = f"change {name} first, as said of it here: its new release brings its own {package}"
            fix = _install_for_all(package, stay) if name in stay else after
            yield Finding("problem", message, (f"Requires-Dist of {name}: {requirement}",), fix)


def _pins(machine: Machine) -> dict[str, dict[str, Requirement]]:
    """package: who requires it, and how."""
    pins: dict[str, dict[str, Requirement]] = {}
    for name in PINNED_BY:
        distribution = machine.installed.get(name)
        for text in (distribution.requires or []) if distribution else []:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pins.setdefault(re.sub(r"[-_.]+", "-", requirement.name).lower(), {})[name] = requirement
    return pins


def _install_for_all(package: str, pinned_by: dict[str, Requirement]) -> str:
    """One line for all that require `package`: a release for one of them may be refused by another one."""
    together = SpecifierSet()
    for requirement in pinned_by.values():
        together &= requirement.specifier
    if _possible(together):
        return f"pip install '{package}{together}'"
    pins = ", ".join(f"{by}: {requirement.specifier}" for by, requirement in pinned_by.items())
    return (
        f"no {package} is right for all that need it ({pins}); pip chooses releases that go together if it is given "
        f"all of them: pip install --upgrade {' '.join(pinned_by)} {package}"
    )


def _possible(specifiers: SpecifierSet) -> bool:
    """Whether some version is in all of them: if any is, then one at a bound of theirs or right behind it."""
    candidates = ["0"]
    for specifier in specifiers:
        bound = Version(specifier.version.removesuffix(".*"))
        *release, last = bound.release
        candidates += [str(bound), f"{bound.base_version}.0.0.1", ".".join(map(str, (*release, last + 1)))]
    return any(_holds(specifiers, candidate) for candidate in candidates)


def _holds(specifiers: SpecifierSet, version: str) -> bool:
    return specifiers.contains(version, prereleases=True)


def _known_bad(machine: Machine) -> Iterator[Finding]:
    for name, range_, other, other_range, message, install, source in KNOWN_BAD:
        have, beside = machine.version(name), machine.version(other)
        if have and beside and _holds(SpecifierSet(range_), have) and _holds(SpecifierSet(other_range), beside):
            evidence = (f"{name} {have} with {other} {beside}", f"source: {source}")
            yield Finding("problem", message, evidence, f"pip install '{install}'")


# parts of CUDA's toolkit: their packages have no suffix from CUDA 13 on, "-cu12" before
_OF_THE_TOOLKIT = re.compile(
    r"nvidia-(cuda-[a-z-]+|cublas|cufft|cufile|curand|cusolver|cusparse|npp|nvfatbin|nvjitlink|nvjpeg|nvptxcompiler|nvtx|nvvm)"
)


def _two_majors(machine: Machine) -> Iterator[Finding]:
    """Packages of CUDA 12 beside a torch for CUDA 13, and the other way round."""
    if machine.torch_cuda is None:
        return
    major = int(machine.torch_cuda.split(".")[0])
    built_for = {name: cuda for name in sorted(machine.installed) if (cuda := _cuda_of(machine, name, major))}
    others = [name for name, cuda in built_for.items() if cuda != major]
    if others:
        message = f"packages for another CUDA than torch's {machine.torch_cuda}: {', '.join(others)}"
        install = " ".join(_for_cuda(machine, name, major) for name in others)
        fix = f"pip uninstall {' '.join(others)}, then pip install --force-reinstall --no-deps {install}"
        yield Finding("problem", message, tuple(f"{name} {machine.version(name)}" for name in others), fix)


def _cuda_of(machine: Machine, name: str, major: int) -> int | None:
    """CUDA's major version that a package is for, beside a torch for CUDA `major`."""
    if match := re.fullmatch(r"(?:nvidia-[a-z-]+|transformer-engine)-cu(\d+)", name):
        return int(match[1])
    stands_for_nothing = (machine.version(name) or "").startswith("0.0.")  # "a fake package to warn the user"
    return max(major, 13) if _OF_THE_TOOLKIT.fullmatch(name) and not stands_for_nothing else None


def _for_cuda(machine: Machine, name: str, major: int) -> str:
    """What takes the place of a package; its version where torch, or the replaced TransformerEngine, fixes it.
    Installed again also where it is here: uninstalling the other one removes files that both own."""
    stem = re.sub(r"-cu\d+$", "", name)
    wanted = stem if major >= 13 and _OF_THE_TOOLKIT.fullmatch(stem) else f"{stem}-cu{major}"
    requirement = _pins(machine).get(wanted, {}).get("torch")
    fixed = f"=={machine.version(name)}" if stem == "transformer-engine" else ""
    return f"{wanted}{requirement.specifier if requirement else fixed}"


_TWICE = {"cuDNN": "libcudnn.so.*", "the CUDA runtime": "libcudart.so.*", "NCCL": "libnccl.so.*", "cuBLAS": "libcublas.so.*"}  # fmt: skip  # noqa: E501


def twice(machine: Machine) -> Iterator[Finding]:
    """Shared libraries that a process could load from two places, in two versions."""
    clean = True
    for library, pattern in _TWICE.items():
        own, chosen, system = (_first(folders, pattern) for folders in _folders(machine))
        before = _other_versions(chosen, own or system)
        if before:
            clean = False
            message = (
                f"{library} is here in several versions, and LD_LIBRARY_PATH puts {before[0].name} before the others"
            )
            yield Finding("problem", message, _shown(own, chosen, system), "unset LD_LIBRARY_PATH")
        elif _other_versions(own + system, own):
            clean = False
            message = f"{library} is here in several versions; whichever is loaded first serves the whole process"
            fix = "import torch before anything else; uninstall the package or system library that torch does not need"
            yield Finding("warning", message, _shown(own, chosen, system), fix)
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
    Check("versions", "are the installed versions compatible?", versions),
    Check("twice", "are two versions of cuDNN or the CUDA runtime installed?", twice),
)
