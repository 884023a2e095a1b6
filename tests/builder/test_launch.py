"""Shims, the history and the causes of standing still, each alone."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from powertrain.builder import stall
from powertrain.builder.history import History, Record, UnitRecord
from powertrain.builder.host import Nvcc
from powertrain.builder.launcher import is_gcc, source
from powertrain.builder.processes import Pace, Process, tree, unmanaged_compilers
from powertrain.builder.recipes import GENERIC, recipe_of
from powertrain.builder.shims import Shims, make_shims, shimmed

ROOT = Path(__file__).resolve().parents[2]
NVCC = Nvcc("/cuda/bin/nvcc", "/cuda", (13, 0), (75, 80), 15)


@pytest.fixture
def shims(tmp_path: Path) -> Shims:
    compiler = tmp_path / "real/gcc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\nexit 7\n')
    compiler.chmod(0o755)
    return make_shims(tmp_path / "shims", tmp_path / "sockets", {"PATH": str(compiler.parent)}, NVCC)


def test_without_a_builder_a_shim_is_the_compiler(shims: Shims) -> None:
    for command in ([str(shims.bin / "gcc")], [str(shims.launch), str(shims.bin / "gcc")]):
        done = subprocess.run([*command, "-c", "a b.c", "-DX='1'"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, "<-c>\n<a b.c>\n<-DX='1'>\n")


def test_a_shim_outlives_our_python(shims: Shims) -> None:
    shim = shims.bin / "gcc"
    shim.write_text(shim.read_text().replace(sys.executable, "/gone/python"))
    assert subprocess.run([shim, "x.c"], capture_output=True, text=True).stdout == "<x.c>\n"


def test_the_same_shims_are_made_once(shims: Shims, tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path / "real")}
    assert make_shims(tmp_path / "shims", tmp_path / "sockets", environment, NVCC) == shims
    other = make_shims(tmp_path / "shims", tmp_path / "sockets", environment, None)
    assert other.bin != shims.bin and (shims.bin / "nvcc").exists() and not (other.bin / "nvcc").exists()


def test_only_what_the_user_left_open_is_set(shims: Shims) -> None:
    added = shimmed({"PATH": "/usr/bin"}, shims, NVCC)
    assert added == {
        "PATH": f"{shims.bin}:/usr/bin",
        "PYTORCH_NVCC": str(shims.bin / "nvcc"),
        "CUDACXX": str(shims.bin / "nvcc"),
        "CMAKE_CUDA_COMPILER_LAUNCHER": str(shims.launch),
    }
    yours = {"PATH": "/usr/bin", "CXX": "/opt/g++", "CUDACXX": "/opt/nvcc", "PYTORCH_NVCC": "ccache nvcc"}
    added = shimmed(yours, shims, NVCC)
    launch = str(shims.launch)
    assert added == {
        "PATH": f"{shims.bin}:/usr/bin",
        "CMAKE_CXX_COMPILER_LAUNCHER": launch,
        "CMAKE_CUDA_COMPILER_LAUNCHER": launch,
    }


def test_a_compiler_that_the_user_named_waits_for_room_too(tmp_path: Path) -> None:
    compiler = tmp_path / "elsewhere/g++-99"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\necho "elsewhere $1"\n')
    compiler.chmod(0o755)
    yours = {"PATH": "/usr/bin", "CXX": str(compiler), "CC": "ccache gcc", "CMAKE_CUDA_COMPILER_LAUNCHER": "ccache"}
    shims = make_shims(tmp_path / "shims", tmp_path / "sockets", yours, None)
    added = shimmed(yours, shims, None)
    assert added == {
        "PATH": f"{shims.bin}:/usr/bin",
        "CXX": str(shims.bin.parent / "CXX/g++-99"),
        "CMAKE_C_COMPILER_LAUNCHER": str(shims.launch),
    }
    assert "launcher.py" in Path(added["CXX"]).read_text()
    assert subprocess.run([added["CXX"], "-c"], capture_output=True, text=True).stdout == "elsewhere -c\n"


@pytest.mark.parametrize(
    "command, name",
    [
        ("nvcc -c /x/flash_bwd.cu -o y.o", "flash_bwd.cu"),
        ("g++ -shared a.o b.o -o c.so", None),
        ("g++ --version", None),
        ("c++ -Ix.cpp -c y.cpp", "y.cpp"),
    ],
)
def test_only_compiles_ask_for_room(command: str, name: str | None) -> None:
    assert source(command.split()) == name


def test_gcc_is_known_at_the_end_of_its_links(tmp_path: Path) -> None:
    for name, gcc in {"x86_64-linux-gnu-g++-12": True, "gcc": True, "clang++-18": False, "nvcc": False}.items():
        link = tmp_path / f"c++-to-{name}"
        (tmp_path / name).touch()
        link.symlink_to(tmp_path / name)
        assert is_gcc(str(link)) is gcc


def test_compilers_that_no_launcher_started() -> None:
    def process(pid: int, parent: int, name: str) -> Process:
        return Process(pid, parent, name, "running", 0, 0.0, 0)

    processes = {
        each.pid: each
        for each in (
            *(process(1, 0, "ninja"), process(2, 1, "nvcc"), process(3, 2, "cicc")),
            *(process(4, 1, "sh"), process(5, 4, "nvcc"), process(6, 5, "ptxas")),
        )
    }
    assert [each.pid for each in unmanaged_compilers(processes, launched=[2])] == [5]


def _record(code: int = 0, seconds: float = 60.0) -> Record:
    return Record(time.time(), "flash-attn", "pip install flash-attn", "80", 2, seconds, 100.0, 2**31, code, "/x.log")


def test_the_history_makes_the_next_estimate(tmp_path: Path) -> None:
    history = History(tmp_path / "a/history.sqlite")
    flash = recipe_of(["pip", "install", "flash-attn"])
    assert history.last() == [] and history.estimate(flash, "pip install flash-attn", "80") is None
    history.add(_record(), [UnitRecord("a.cu", 30, 2**30), UnitRecord("b.cu", 10, 2**28)])
    history.add(_record(code=1, seconds=1), [UnitRecord("a.cu", 31, 2**29)])
    estimate = history.estimate(flash, "pip install flash-attn", "80")
    assert estimate and estimate.seconds == 60 and estimate.bytes == int(1.2 * 2**30)
    assert "a.cu" in estimate.why
    other = history.estimate(flash, "pip install flash-attn", "80;90")
    assert other and other.seconds is None  # the time of one arch is not that of two
    elsewhere = history.estimate(flash, "pip install flash-attn==2.8.3", "80")
    assert elsewhere == estimate  # the same project by another command
    assert history.estimate(GENERIC, "make", "80") is None  # other builds have nothing in common
    assert [record.code for record in history.last()] == [1, 0]


def test_a_build_that_failed_may_not_have_come_to_its_largest(tmp_path: Path) -> None:
    history, flash = History(tmp_path / "history.sqlite"), recipe_of(["pip", "install", "flash-attn"])
    history.add(_record(code=1), [UnitRecord("small.cpp", 3, 2**28)])
    estimate = history.estimate(flash, "pip install flash-attn", "80")
    assert estimate and estimate.bytes == flash.bytes and "builds that failed" in estimate.why
    history.add(_record(code=1), [UnitRecord("large.cu", 3, 2 * flash.bytes)])
    estimate = history.estimate(flash, "pip install flash-attn", "80")
    assert estimate and estimate.bytes == int(2.4 * flash.bytes)


def test_a_history_of_another_version_is_not_touched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = History(tmp_path / "history.sqlite")
    history.add(_record(), [])
    with contextlib.closing(sqlite3.connect(tmp_path / "history.sqlite")) as connection:
        connection.execute("pragma user_version = 9")
    before = (tmp_path / "history.sqlite").read_bytes()
    assert history.last() == []
    history.add(_record(), [])
    assert (tmp_path / "history.sqlite").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert "must have version 1, got 9" in capfd.readouterr().err


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a line which does not come."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield process
    process.communicate()


def test_a_process_that_waits_for_input(reader: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wchan = Path(f"/proc/{reader.pid}/wchan")
    deadline = time.monotonic() + 30
    while wchan.read_text() in ("", "0") and time.monotonic() < deadline:
        time.sleep(0.01)
    if "read" not in wchan.read_text():
        pytest.skip("this kernel does not say what a process waits for")
    cause = stall.cause({reader.pid: tree(os.getpid())[reader.pid]}, [tmp_path])
    assert f"cat (process {reader.pid}) waits for input on pipe" in cause.reason


def test_swapping_is_named(tmp_path: Path) -> None:
    assert "MAX_JOBS=1" in stall.cause({}, [tmp_path], swap_rate=5000).fix


def test_a_disk_that_does_not_answer_is_named(tmp_path: Path) -> None:
    asleep = Process(10**9, 1, "ninja", psutil.STATUS_DISK_SLEEP, 0, 0.0, 0)
    cause = stall.cause({asleep.pid: asleep}, [tmp_path])
    assert "disk that does not answer: ninja" in cause.reason and "TMPDIR" in cause.fix


def test_a_lock_with_an_owner_is_left_alone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    owner = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton takes it
    assert stall.find_locks([tmp_path]) == [lock] and stall.owners(lock) == [os.getpid()]
    assert stall.cause({}, [tmp_path]).lock is None
    os.close(owner)
    assert stall.cause({}, [tmp_path]).lock == lock


def test_what_holds_something_is_no_lock_of_torch(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1234")
    assert stall.find_locks([tmp_path]) == []


def test_looking_costs_little_of_what_the_build_takes() -> None:
    pace = Pace(least=0.25, most=2.0)
    for _ in range(20):
        pace.took(spent=1.0, work=100.0)
    assert pace.pause == 2.0
    for _ in range(20):
        pace.took(spent=1.0, work=1000.0)
    assert pace.pause == 0.25


def test_movement_of_any_kind_ends_stillness() -> None:
    def tree_of(cpu: float, io: int = 0) -> dict[int, Process]:
        return {1: Process(1, 0, "cicc", psutil.STATUS_RUNNING, 0, cpu, io)}

    stillness = stall.Stillness(0.0)
    assert stillness.observe(tree_of(0.01), 10.0) == 10
    assert stillness.observe(tree_of(0.05), 20.0) == 20  # what polling costs
    assert stillness.observe(tree_of(5.0), 30.0) == 0
    assert stillness.observe(tree_of(5.0, io=10**8), 40.0) == 0
    assert stillness.observe(tree_of(5.0, io=10**8), 45.0) == 5
    stillness.spoke(46.0)
    assert stillness.observe(tree_of(5.0, io=10**8), 50.0) == 4


def test_slow_but_working() -> None:
    assert stall.slow_but_working(10, "a.cu", "ptxas", 10) is None
    assert "ptxas on a.cu, 6 min" in (stall.slow_but_working(360, "a.cu", "ptxas", 360) or "")


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index == 1) return 15; /* lost */
    *device = (void *)(0x7000000000000000 + index);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, (long)device & 2 ? "NVIDIA B200" : "NVIDIA GeForce RTX 3090", length);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = (long)device & 2 ? 10 : 8;
    *minor = (long)device & 2 ? 0 : 6;
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_gpus_are_those_that_nvml_lists(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=tmp_path, check=True)
    ask = "from powertrain.runtime.machine import present_gpus; print(*present_gpus()[0], sep='; ')"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "NVIDIA GeForce RTX 3090 (sm_86); NVIDIA B200 (sm_100)"
