"""What builders print: phases, counts, wheels, errors; and how they are made to print it."""

import pytest

from powertrain.builder.ending import first_error
from powertrain.builder.progress import Progress, is_pip, verbose

PIP = """\
Collecting git+https://github.com/NVIDIA/TransformerEngine.git@stable
  Cloning https://github.com/NVIDIA/TransformerEngine.git (to revision stable) to /tmp/pip-req-build-x
  Running command git clone --filter=blob:none https://github.com/NVIDIA/TransformerEngine.git /tmp/pip-req-build-x
  Running command git submodule update --init --recursive -q
  Preparing metadata (pyproject.toml): started
Building wheels for collected packages: transformer_engine
  Building wheel for transformer_engine (pyproject.toml): started
  -- The CUDA compiler identification is NVIDIA 13.0.88
  [1/3] Building CUDA object CMakeFiles/te.dir/a.cu.o
  [2/3] Building CUDA object CMakeFiles/te.dir/b.cu.o
  [3/3] Linking CXX shared library libte.so
  [1/33] c++ -MMD -c common.cpp -o common.o
  [33/33] c++ -MMD -c last.cpp -o last.o
  creating '/tmp/pip-wheel-x/transformer_engine-2.15-cp311-cp311-linux_x86_64.whl' and adding 'build' to it
  Building wheel for transformer_engine (pyproject.toml): finished with status 'done'
  Created wheel for transformer_engine: filename=transformer_engine-2.15-cp311-cp311-linux_x86_64.whl size=1
Installing collected packages: transformer_engine
Successfully installed transformer_engine-2.15
"""


def test_the_phases_of_pip() -> None:
    progress = Progress()
    phases = [progress.phase for line in PIP.splitlines() if progress.feed(line)]
    assert phases == [
        *("resolve", "clone", "submodules", "metadata", "compile", "configure", "compile", "link"),
        *("compile", "wheel", "install"),
    ]
    assert (progress.done, progress.total, progress.before) == (33, 33, 3)
    assert progress.wheels == ["transformer_engine-2.15-cp311-cp311-linux_x86_64.whl"]


UV = """\
DEBUG Fetching source distribution from Git: https://github.com/x/tinyext
DEBUG Calling `setuptools.build_meta.prepare_metadata_for_build_wheel("/tmp/x")`
Resolved 1 package in 679ms
   Building tinyext @ file:///src/tiny
DEBUG Calling `setuptools.build_meta.build_wheel(b"/tmp/x")`
DEBUG running build_ext
DEBUG [1/2] c++ -c a.cpp
DEBUG [2/2] c++ -c b.cpp
DEBUG creating '/tmp/x/tinyext-1-cp311-cp311-linux_x86_64.whl' and adding 'build' to it
DEBUG Built `tinyext @ file:///src/tiny` into `tinyext-1-cp311-cp311-linux_x86_64.whl`
      Built tinyext @ file:///src/tiny
Installed 1 package in 0.65ms
"""


def test_the_phases_of_uv() -> None:
    progress = Progress()
    phases = [progress.phase for line in UV.splitlines() if progress.feed(line)]
    assert phases == ["clone", "metadata", "resolve", "compile", "wheel", "install"]
    assert (progress.done, progress.total) == (2, 2)
    assert progress.wheels == ["tinyext-1-cp311-cp311-linux_x86_64.whl"]


def test_percents_of_make() -> None:
    progress = Progress()
    progress.feed("[ 12%] Building CXX object CMakeFiles/x.dir/h.cpp.o")
    assert (progress.phase, progress.done, progress.total) == ("compile", 12, 100)
    assert progress.eta([], [], None, elapsed=12) == pytest.approx(88)


def test_time_left() -> None:
    progress = Progress()
    assert progress.eta([], [], None, 5) is None
    progress.feed("[4/10] c++ -c x.cpp")
    assert progress.eta([10, 20], [5, 99], None, 30) == pytest.approx((6 * 15 - 5 - 15) / 2)
    assert progress.eta([10, 20], [], None, 30) == pytest.approx(6 * 15)
    assert progress.eta([10, 20], [], earlier=100, elapsed=30) == 70
    assert progress.eta([10, 20], [], earlier=20, elapsed=30) == pytest.approx(90)  # longer than the last time


@pytest.mark.parametrize(
    "command, shown",
    [
        ("pip install x", "pip install -v x"),
        ("/venv/bin/pip3.11 --proxy p wheel x", "/venv/bin/pip3.11 --proxy p wheel -v x"),
        ("python3 -m pip install x", "python3 -m pip install -v x"),
        ("pip install -vv x", "pip install -vv x"),
        ("pip install -q x", "pip install -q x"),
        ("uv pip install x", "uv -v pip install x"),
        ("cmake --build b", "cmake --build b"),
        ("python setup.py install", "python setup.py install"),
    ],
)
def test_pip_and_uv_are_made_to_talk(command: str, shown: str) -> None:
    assert verbose(command.split()) == shown.split()
    assert is_pip(command.split()) == ("pip" in command and not command.startswith("uv"))


@pytest.mark.parametrize(
    "text, what",
    [
        ("  nvcc fatal   : Unsupported gpu architecture 'compute_120'", "nvcc does not know this GPU"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "a compiler was killed for want of memory"),
        ("/usr/include/x.h:1: error: unsupported GNU version! gcc versions later", "the host compiler is too new"),
        ("RuntimeError: The detected CUDA version (12.4) mismatches the version that", "different CUDA versions"),
        ("OSError: CUDA_HOME environment variable is not set.", "nvcc was not found"),
        ("ModuleNotFoundError: No module named 'torch'", "a Python package that is not there"),
        ("/usr/bin/ld: cannot find -lcudnn: No such file or directory", "a library to link with is missing"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("fatal: unable to access 'https://x/': Could not resolve host: x", "the network failed"),
        ("fatal: could not read Username for 'https://x': terminal prompts disabled", "nobody was there to answer"),
        ("error: invalid command 'bdist_wheel'", "setuptools cannot make wheels"),
        ("error: package directory 'x' does not exist", "the build script failed"),
        ("x.cpp:3:10: error: 'y' was not declared", "the compiler refused the source"),
        ("a.cu(3): error: identifier \"foo\" is undefined", "the compiler refused the source"),
    ],
)  # fmt: skip
def test_the_first_error_says_why(text: str, what: str) -> None:
    lines = ["[1/2] nvcc -Werror -c a.cu", "warning: something", text, "error: subprocess-exited-with-error", "Killed"]
    failure = first_error(lines)
    assert failure and failure.line == text.strip()
    assert what in failure.cause and failure.fix
    assert first_error([f"DEBUG {line}" for line in lines]) == failure  # of uv -v


def test_no_error_is_invented() -> None:
    assert first_error(["[1/2] c++ -c error.cpp -o error.o", "checking for errors... none"]) is None
