"""Recipe: what building a known project takes. A number says where it is from, or that nobody measured it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    wheels: str = ""  # where somebody has built it already
    package: str = ""  # its name on PyPI

    @property
    def bytes(self) -> int:
        return int(self.gigabytes * _GIB)


_FLASH = "github.com/Dao-AILab/flash-attention, pull request 2079: 3 to 5 GB a thread"
_GUESS = "not measured"

RECIPES = (
    Recipe(
        "flash-attn-3",
        r"flash[-_]attn[-_]?3|flash[-_]attention\S*hopper|subdirectory=hopper",
        5,
        _FLASH,
        archs=(80, 90),
        disk=15,
        wheels="github.com/Dao-AILab/flash-attention/releases",
    ),
    Recipe(
        "flash-attn",
        r"flash[-_]attn|flash[-_]attention",
        5,
        _FLASH,
        archs=(80, 90, 100, 110, 120),
        disk=10,
        wheels="github.com/Dao-AILab/flash-attention/releases, for the torch, CUDA and C++ ABI in the wheel's name",
        package="flash-attn",
    ),
    Recipe(
        "transformer-engine",
        r"transformer[-_]?engine",
        4,
        "not measured; github.com/NVIDIA/TransformerEngine issues 976, 978 and 1077: all cores at once exhaust memory",
        headers=("cudnn.h", "nccl.h"),
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
    ),
    Recipe("apex", r"\bapex\b", 2, _GUESS, disk=5),
    Recipe(
        "deepspeed",
        r"deepspeed",
        2,
        _GUESS,
        wheels="pip install deepspeed: its ops are built at first use",
        package="deepspeed",
    ),
    Recipe(
        "mamba-ssm",
        r"mamba[-_]ssm|state-spaces/mamba",
        3,
        _GUESS,
        wheels="github.com/state-spaces/mamba/releases",
        package="mamba-ssm",
    ),
    Recipe(
        "causal-conv1d",
        r"causal[-_]conv1d",
        2,
        _GUESS,
        wheels="github.com/Dao-AILab/causal-conv1d/releases",
        package="causal-conv1d",
    ),
    Recipe(
        "vllm",
        r"\bvllm\b",
        10,
        "github.com/vllm-project/vllm issue 14452: 4 jobs are safe in 64 GB, 3 to 4 hours",
        disk=30,
        wheels="pip install vllm, or VLLM_USE_PRECOMPILED=1",
        package="vllm",
    ),
    Recipe("gpt-neox fused kernels", r"gpt[-_]?neox|fused[-_]kernels", 1.5, _GUESS),
)
GENERIC = Recipe("any other build", r"", 2, _GUESS, needs_nvcc=False, disk=2)


def recipe_of(command: Sequence[str]) -> Recipe:
    """The first recipe whose name is in the command; else the one for any build."""
    text = " ".join(command).lower()
    return next((recipe for recipe in RECIPES if re.search(recipe.pattern, text)), GENERIC)
