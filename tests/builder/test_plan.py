"""What a build is told, on machines made up here."""

from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.builder.host import HEADERS, BuildHost, Compiler, Gpu, Nvcc, Python
from powertrain.builder.plan import Estimate, Plan, make_plan
from powertrain.builder.recipes import GENERIC, RECIPES, recipe_of
from powertrain.builder.wheels import Wheel

GIB = 2**30
NVCC = Nvcc("/cuda/bin/nvcc", "/cuda", (12, 4), (75, 80, 86, 89, 90), 13)
PYTHON = Python("/venv/bin/python", "3.11.7", True, "/venv/site", "2.11.0", "12.4")
MACHINE = BuildHost(
    cores=16,
    cores_why="cores (affinity)",
    memory=64 * GIB,
    memory_why="MemAvailable",
    tmp="/tmp",
    disk=100 * GIB,
    gpus=(Gpu("RTX 3090", 86), Gpu("RTX 2080 Ti", 75), Gpu("RTX 3090", 86)),
    gpus_why="NVML",
    nvcc=NVCC,
    compiler=Compiler("/usr/bin/g++", "g++ 12.2.0", 12),
    python=PYTHON,
    headers={name: f"/usr/include/{name}" for name in HEADERS},
)
TE = ["pip", "install", "--no-build-isolation", "git+https://github.com/NVIDIA/TransformerEngine.git@stable"]

FLASH = ["pip", "install", "--no-build-isolation", "flash-attn"]


def plan(host: BuildHost = MACHINE, command: list[str] = TE, **environment: str) -> Plan:
    return make_plan(command, environment, host)


def problems(host: BuildHost, command: list[str] = TE) -> str:
    return " | ".join(map(str, plan(host, command).refusals))


def test_each_variable_in_its_own_format() -> None:
    environment = plan().environment
    assert environment["TORCH_CUDA_ARCH_LIST"] == "7.5 8.6"
    assert environment["NVTE_CUDA_ARCHS"] == environment["CUDAARCHS"] == "75;86"
    assert environment["CMAKE_CUDA_ARCHITECTURES"] == "75;86"
    assert environment["FLASH_ATTN_CUDA_ARCHS"] == "80"
    assert environment["CUDA_HOME"] == "/cuda"
    assert environment["MAX_JOBS"] == environment["CMAKE_BUILD_PARALLEL_LEVEL"] == "11"  # 0.7 of 64 GiB, 4 each
    assert environment["NVCC_THREADS"] == environment["NVTE_BUILD_THREADS_PER_JOB"] == "1"


def test_three_digit_archs() -> None:
    environment = plan(replace(MACHINE, gpus=(Gpu("B200", 100), Gpu("RTX 5090", 120), Gpu("H100", 90)))).environment
    assert environment["TORCH_CUDA_ARCH_LIST"] == "9.0 10.0 12.0"
    assert environment["NVTE_CUDA_ARCHS"] == environment["FLASH_ATTN_CUDA_ARCHS"] == "90;100;120"


def test_what_the_user_set_stays() -> None:
    made = plan(MAX_JOBS="4", TORCH_CUDA_ARCH_LIST="8.0+PTX")
    assert not {"MAX_JOBS", "TORCH_CUDA_ARCH_LIST"} & set(made.environment)
    assert made.jobs == 4
    yours = {variable.name: variable for variable in made.variables if variable.yours}
    assert yours["MAX_JOBS"].value == "4" and "11" in yours["MAX_JOBS"].why


def test_measurements_replace_the_recipe() -> None:
    made = make_plan(TE, {}, MACHINE, Estimate(2 * GIB, 600, "2 builds here"))
    assert made.environment["MAX_JOBS"] == "16"


def test_nothing_is_set_for_gpus_that_nobody_named() -> None:
    made = plan(replace(MACHINE, gpus=(), gpus_why="no driver"))
    assert not {name for name in made.environment if "ARCH" in name}
    assert any("--arch" in note for note in made.notes)


@pytest.mark.parametrize(
    "host, says",
    [
        (replace(MACHINE, nvcc=None), "no nvcc"),
        (replace(MACHINE, gpus=(Gpu("RTX 5090", 120),)), "too old for sm_120"),
        (replace(MACHINE, nvcc=replace(NVCC, version=(13, 0), archs=(80, 86))), "too new for sm_75"),
        (replace(MACHINE, python=replace(PYTHON, torch_cuda="13.0")), "CUDA_HOME to a CUDA 13.x toolkit"),
        (replace(MACHINE, compiler=Compiler("/usr/bin/g++", "g++ 14", 14)), "CXX=g++-13"),
        (replace(MACHINE, compiler=None), "no C++ compiler"),
        (replace(MACHINE, python=replace(PYTHON, headers=False)), "python3.11-dev"),
        (replace(MACHINE, headers={**MACHINE.headers, "cudnn.h": None}), "cudnn.h"),
        (replace(MACHINE, disk=GIB), "TMPDIR"),
        # "0.0 GiB free", and a larger disk to be found
        (replace(MACHINE, disk=None, tmp="/no such"), "TMPDIR /no such is no folder. Fix: mkdir -p '/no such'"),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(host: BuildHost, says: str) -> None:
    assert not problems(MACHINE)
    assert says in problems(host) and "Fix: " in problems(host)


def test_headers_in_torchs_wheels_are_found_by_the_compiler() -> None:
    inside = {"cudnn.h": "/venv/site/nvidia/cudnn/include/cudnn.h", "nccl.h": "/venv/site/nvidia/nccl/include/nccl.h"}
    made = plan(replace(MACHINE, headers={**MACHINE.headers, **inside}))
    assert made.environment["CPATH"] == "/venv/site/nvidia/cudnn/include:/venv/site/nvidia/nccl/include"
    assert made.environment["CUDNN_PATH"] == "/venv/site/nvidia/cudnn"
    assert not {"CPATH", "CUDNN_PATH"} & set(plan().environment)


def test_no_flash_attention_for_turing() -> None:
    assert "sm_75" in problems(MACHINE, FLASH)
    assert not problems(replace(MACHINE, gpus=MACHINE.gpus[:1]), FLASH)


AMPERE = replace(MACHINE, gpus=MACHINE.gpus[:1])


@pytest.mark.parametrize(
    "command, refused",
    [
        ("pip install flash-attn", True),
        ("pip3.11 install -v flash_attn==2.8.3", True),
        ("python -m pip install git+https://github.com/NVIDIA/apex", True),
        ("uv pip install flash-attn", True),
        ("pip wheel flash-attn", True),
        ("pip install --no-build-isolation flash-attn", False),
        ("uv pip install --no-build-isolation-package flash-attn flash-attn", False),
        ("uv pip install --no-build-isolation-package=flash_attn flash-attn", False),
        ("pip download flash-attn", False),
        ("python setup.py install --prefix flash-attn", False),
        ("pip install xformers", False),
        ("pip install numpy", False),
    ],
)
def test_a_build_that_imports_torch_is_not_isolated(command: str, refused: bool) -> None:
    said = problems(AMPERE, command.split())
    assert ("--no-build-isolation" in said) == refused == bool(said)
    assert not plan(AMPERE, command.split(), PIP_NO_BUILD_ISOLATION="0").refusals


def test_isolation_without_your_torch_is_noted() -> None:
    notes = " ".join(plan(AMPERE, ["pip", "install", "xformers"]).notes)
    assert "a torch that pip chooses, not for your 2.11.0" in notes
    assert "that pip chooses" not in " ".join(plan(AMPERE, [*FLASH[:2], "--no-build-isolation", "xformers"]).notes)


@pytest.mark.parametrize("name", ["flash-attn", "xformers", "vllm", "mamba-ssm", "causal-conv1d"])
def test_no_cuda_build_with_a_torch_that_has_none(name: str) -> None:
    command = ["pip", "install", "--no-build-isolation", name]
    without = replace(AMPERE, python=replace(PYTHON, torch="2.11.0+cpu", torch_cuda=None))
    assert "a build without CUDA" in problems(without, command) and "Fix: " in problems(without, command)
    none = replace(AMPERE, python=replace(PYTHON, torch=None, torch_cuda=None))
    assert "has no torch" in problems(none, command)
    assert not problems(AMPERE, command) and not problems(without, ["pip", "install", "numpy"])


def test_a_wheel_that_the_command_takes_needs_no_compiler() -> None:
    bare = replace(AMPERE, nvcc=None, compiler=None, disk=GIB)
    wheel = Wheel("vllm-0.9", "pip install vllm", automatic=True)
    assert problems(bare, ["pip", "install", "vllm"])
    made = make_plan(["pip", "install", "vllm"], {}, bare, wheel=wheel)
    assert not made.refusals and "nothing is compiled: this command takes vllm-0.9" in made.notes[0]
    other = make_plan(["pip", "install", "vllm"], {}, bare, wheel=replace(wheel, automatic=False))
    assert other.refusals
    by_setup = replace(wheel, by_setup=True)  # its setup.py runs first, and imports torch
    said = make_plan(["pip", "install", "flash-attn"], {}, bare, wheel=by_setup).refusals
    assert len(said) == 1 and "--no-build-isolation" in str(said[0])


def test_a_build_of_anything_needs_no_nvcc() -> None:
    assert not problems(replace(MACHINE, nvcc=None, gpus=()), ["make"])


@pytest.mark.parametrize(
    "command, name",
    [
        ("pip install flash_attn==2.8.3", "flash-attn"),
        ("pip install transformer-engine[pytorch]", "transformer-engine-torch"),  # the core is a wheel
        ("pip install transformer_engine_torch==2.20.2", "transformer-engine-torch"),
        (
            "pip install transformer_engine[pytorch]@git+https://github.com/NVIDIA/TransformerEngine",
            "transformer-engine",
        ),
        ("pip install git+https://github.com/facebookresearch/xformers", "xformers"),
        ("python setup.py install", GENERIC.name),
        ("uv pip install git+https://github.com/state-spaces/mamba", "mamba-ssm"),
        ("cmake --build build", GENERIC.name),
    ],
)
def test_recipes_are_found_by_name(command: str, name: str) -> None:
    assert recipe_of(command.split()).name == name


@pytest.mark.parametrize("command", ["python setup.py install", "pip wheel .", "python -m build", "cmake --build out"])
def test_what_builds_its_folder_is_found_by_the_folders_name(command: str) -> None:
    assert recipe_of(command.split(), Path("/src/flash-attention")).name == "flash-attn"
    assert recipe_of(command.split(), Path("/src/flash-attention/hopper")).name == "flash-attn-3"
    assert recipe_of(["pip", "install", "numpy"], Path("/src/flash-attention")) == GENERIC


def test_times_are_of_the_jobs_that_run() -> None:
    made = plan(replace(MACHINE, cores=4, gpus=MACHINE.gpus[:1]), ["pip", "install", "flash-attn"])
    assert made.estimate.seconds == pytest.approx(made.recipe.core_minutes * 60 / 4)  # type: ignore[operator]
    assert "968" in made.estimate.time_why
    assert plan(command=["make"]).estimate.seconds is None
    measured = make_plan(["make"], {}, MACHINE, Estimate(2 * GIB, 600, "here", "measured here"))
    assert (measured.estimate.seconds, measured.estimate.time_why) == (600, "measured here")


def test_every_recipe_says_where_its_number_is_from() -> None:
    for recipe in (*RECIPES, GENERIC):
        assert recipe.source and recipe.gigabytes > 0
        assert (recipe.core_minutes is None) == (recipe.time_source == "not measured")
