"""Resources that builds of known projects need. Each number has its source, or is marked as not measured."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_GIB = 2**30


@dataclass(frozen=True)
class Recipe:
    name: str
    pattern: str  # found in the command
    gigabytes: float  # of memory one compiler thread wants at its peak (GiB)
    source: str  # of that number
    needs_nvcc: bool = True
    headers: tuple[str, ...] = ()
    archs: tuple[int, ...] = ()  # the code families its build knows; () for any
    disk: float = 5.0  # GiB in the temporary folder
    wheels: str = ""  # URL of prebuilt wheels
    package: str = ""  # its name on PyPI
    release: str = ""  # address of wheels named by torch, CUDA and C++ ABI, in its GitHub releases
    # its build imports torch: "yours" the installed one, which an isolated build does not have; "any" another, which an
    # isolated build brings; "": none
    torch: Literal["yours", "any", ""] = "any"
    core_minutes: float | None = None  # compiling on one core; None: not measured
    time_source: str = "not measured"

    @property
    def bytes(self) -> int:
        return int(self.gigabytes * _GIB)

    def seconds(self, jobs: int) -> float | None:
        """Estimated time of the whole build with that many compilers; cores differ."""
        return None if self.core_minutes is None else self.core_minutes * 60 / jobs


_FLASH = "github.com/Dao-AILab/flash-attention, pull request 2079: 3 to 5 GB a thread"
_GUESS = "not measured"
_GITHUB = "https://github.com"
_RELEASE = "{version}+cu{cuda}torch{torch}cxx11abi{abi}-{tag}-{tag}-linux_x86_64.whl"
_TE_HEADERS = ("cudnn.h", "nccl.h", "cublasLt.h")

RECIPES = (
    Recipe(
        "flash-attn-3",
        r"flash[-_]attn[-_]?3|flash[-_]attention\S*hopper|subdirectory=hopper",
        5,
        _FLASH,
        archs=(80, 90),
        disk=15,
        wheels="github.com/Dao-AILab/flash-attention/releases",
        torch="yours",
    ),
    Recipe(
        "flash-attn",
        r"flash[-_]attn|flash[-_]attention",
        6.5,
        f"measured: version 2.8.3, nvcc 13.0, flash_bwd_hdim128_bf16_sm80.cu alone took 6.0 GiB; {_FLASH}",
        archs=(80, 90, 100, 110, 120),
        disk=10,
        wheels="github.com/Dao-AILab/flash-attention/releases, for the torch, CUDA and C++ ABI in the wheel's name",
        package="flash-attn",
        release=f"{_GITHUB}/Dao-AILab/flash-attention/releases/download/v{{version}}/flash_attn-{_RELEASE}",
        torch="yours",
        core_minutes=650,
        time_source="github.com/Dao-AILab/flash-attention issue 968: 8 min on 64 cores, 45 min on 18",
    ),
    Recipe(
        "transformer-engine-torch",
        r"^(?!.*git\+).*transformer[-_]engine([-_]torch|\[[\w,]*pytorch)",  # PyPI has wheels of the core
        2.7,
        "measured: version 2.20.2, torch 2.13, gcc 12, pybind.cpp takes the most",
        headers=_TE_HEADERS,
        disk=2,
        wheels="github.com/NVIDIA/TransformerEngine/releases, which its setup.py tries first",
        package="transformer-engine-torch",
        core_minutes=17,
        time_source="measured: the same build, gcc 12 on a server's core",
    ),
    Recipe(
        "transformer-engine",
        r"transformer[-_]?engine",
        4,
        "not measured; github.com/NVIDIA/TransformerEngine issues 976, 978 and 1077: all cores at once exhaust memory",
        headers=_TE_HEADERS,
        disk=10,
        wheels="pip install transformer_engine_cu12 or _cu13 (the core; only the torch extension is then built)",
        package="transformer-engine",
    ),
    Recipe(
        "xformers",
        r"xformers",
        4,
        "not measured; github.com/facebookresearch/xformers issue 822: 24 jobs exhaust 96 GB",
        disk=10,
        wheels="pip install xformers (PyPI has wheels, each for one torch version)",
        package="xformers",
        core_minutes=180,
        time_source="github.com/facebookresearch/xformers issue 822: 5 to 10 min on 16 cores, over an hour with 4 jobs",
    ),
    Recipe("apex", r"\bapex\b", 2, _GUESS, disk=5, torch="yours"),
    Recipe(
        "bitsandbytes",
        r"bitsandbytes",
        2,
        _GUESS,
        disk=5,
        wheels="pip install bitsandbytes (PyPI has wheels with a library for each CUDA)",
        package="bitsandbytes",
        torch="",
    ),
    Recipe(
        "deepspeed",
        r"deepspeed",
        2,
        _GUESS,
        torch="",
        wheels="pip install deepspeed: its ops are built at first use",
        package="deepspeed",
    ),
    Recipe(
        "mamba-ssm",
        r"mamba[-_]ssm|state-spaces/mamba",
        4.5,
        "not measured; it asks nvcc for 4 threads, as causal-conv1d does",
        wheels="github.com/state-spaces/mamba/releases",
        package="mamba-ssm",
        release=f"{_GITHUB}/state-spaces/mamba/releases/download/v{{version}}/mamba_ssm-{_RELEASE}",
    ),
    Recipe(
        "causal-conv1d",
        r"causal[-_]conv1d",
        4.5,
        "measured: version 1.7.0, nvcc 13.0, causal_conv1d_bwd.cu, for which it asks nvcc for 4 threads",
        wheels="github.com/Dao-AILab/causal-conv1d/releases",
        package="causal-conv1d",
        release=f"{_GITHUB}/Dao-AILab/causal-conv1d/releases/download/v{{version}}/causal_conv1d-{_RELEASE}",
    ),
    Recipe(
        "vllm",
        r"\bvllm\b",
        10,
        "github.com/vllm-project/vllm issue 14452: 4 jobs are safe in 64 GB, 3 to 4 hours",
        disk=30,
        wheels="pip install vllm, or VLLM_USE_PRECOMPILED=1",
        package="vllm",
        core_minutes=840,
        time_source="github.com/vllm-project/vllm issue 14452: 3 to 4 hours with 4 jobs",
    ),
    Recipe("gpt-neox fused kernels", r"gpt[-_]?neox|fused[-_]kernels", 1.5, _GUESS),
)
GENERIC = Recipe("any other build", r"", 2, _GUESS, needs_nvcc=False, disk=2, torch="")


def recipe_of(command: Sequence[str], folder: Path | None = None) -> Recipe:
    """The first recipe whose name is in the command, or, if it builds `folder`, in the folder's.

    folder  where the command runs; the current one by default
    """
    candidates = [" ".join(command)]
    if _builds_here(command):
        candidates.append("/".join((folder or Path.cwd()).parts[-2:]))
    matches = (recipe for candidate in candidates for recipe in RECIPES if re.search(recipe.pattern, candidate.lower()))
    return next(matches, GENERIC)


def _builds_here(command: Sequence[str]) -> bool:
    name = Path(command[0]).name
    if name in ("cmake", "ninja", "make") or (name.startswith("python") and list(command[1:3]) == ["-m", "build"]):
        return True
    return any(word == "." or word.startswith(("./", ".[")) or word.endswith("setup.py") for word in command[1:])
