"""A CUDA library of ours for two archs, built by nvcc under a limit that its four jobs would pass together."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.builder.history import History

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("nvcc", "cmake", "ninja", "c++")
LIMIT = 900  # MiB; one unit takes about 610 with nvcc 13.0

CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(sorts LANGUAGES CXX CUDA)
add_library(sorts SHARED a.cu b.cu c.cu d.cu)
"""
SOURCE = """
#include <thrust/device_vector.h>
#include <thrust/sort.h>
void sort_{name}(thrust::device_vector<{name}>& values) {{ thrust::sort(values.begin(), values.end()); }}
"""


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
def test_four_jobs_in_the_memory_of_one(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    for file, name in zip("abcd", ("int", "float", "double", "long"), strict=True):
        (tmp_path / f"{file}.cu").write_text(SOURCE.format(name=name))
    script = "cmake -G Ninja -B out . && cmake --build out -j 4"
    options = ["--arch", "9.0", "--arch", "8.0", "--memory", f"{LIMIT}M"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp_path / "data"), "MAX_JOBS": "4"}
    command = [sys.executable, "-m", "powertrain", "build", *options, "--", "sh", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CMAKE_CUDA_ARCHITECTURES:STRING=80;90" in (tmp_path / "out/CMakeCache.txt").read_text()
    code = (tmp_path / "out/libsorts.so").read_bytes()
    assert b"sm_80" in code and b"sm_90" in code
    history = History(tmp_path / "data/powertrain/builds/history.sqlite")
    (record,) = history.last()
    assert record.peak < LIMIT * 2**20
    assert {"a.cu", "b.cu", "c.cu", "d.cu"} <= set(history.units(record.recipe, record.command))
    # the build folder goes on working without us
    (tmp_path / "a.cu").touch()
    subprocess.run(["cmake", "--build", "out"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
