"""Extensions against torch's libraries, compiled here, and this machine's own torch."""

import shutil
import subprocess
from pathlib import Path

import pytest

from powertrain.doctor.elf import opened, symbols
from powertrain.doctor.symbols import undefined
from powertrain.runtime.machine import Machine
from tests.doctor.machines import install_torch, machine, told

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")

ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationE"
SET_DEVICE = "_ZN3c104cuda9SetDeviceEi"


def _library(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-", "-o", path]
    subprocess.run(command, input=source.encode(), check=True)


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    made = machine(tmp_path)
    install_torch(made, "2.8.0", "12.8")
    _library(made.packages[0] / "torch/lib/libc10.so", f"void {ERROR}(void) {{}}")
    return made


def test_symbols_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    _library(file, f"void {ERROR}(void); void weak(void) __attribute__((weak)); void go(void) {{ {ERROR}(); weak(); }}")
    with opened(file) as data:
        assert data is not None
        assert b"go" in set(symbols(data, defined=True)) and set(symbols(data, defined=False)) == {ERROR.encode()}


def test_an_extension_for_another_torch(here: Machine) -> None:
    assert "no extension of torch here" in told(undefined(here))
    extension = here.packages[0] / "flash_attn_2_cuda.so"
    _library(extension, f"void {ERROR}(void); void go(void) {{ {ERROR}(); }}")
    assert "flash-attn finds its symbols in torch 2.8.0" in told(undefined(here))
    _library(extension, f"void {SET_DEVICE}(void); void {ERROR}(void); void go(void) {{ {ERROR}(); {SET_DEVICE}(); }}")
    (finding,) = undefined(here)
    assert finding.level == "problem" and "compiled for another torch than 2.8.0" in finding.message
    assert f"undefined symbol {SET_DEVICE}" in finding.evidence[0] and ERROR not in finding.evidence[0]


def test_a_build_for_another_torch_is_set_aside(here: Machine) -> None:
    build = here.cwd / "megatron/fused_kernels/build"
    _library(build / "rope.so", f"void {SET_DEVICE}(void); void go(void) {{ {SET_DEVICE}(); }}")
    (build / "build.ninja").touch()
    (finding,) = undefined(here)
    assert finding.level == "problem" and "was built for another torch than 2.8.0" in finding.message and finding.apply
    (build / "lock").touch()
    assert "left alone" in finding.apply() and build.exists()
    (build / "lock").unlink()
    assert "renamed to build.stale-" in finding.apply() and not build.exists()


def test_torch_itself_is_whole() -> None:
    import torch

    folder = Path(torch.__file__).parent / "lib"
    wanted: set[bytes] = set()
    there: set[bytes] = set()
    for name in ("libtorch_python.so", "libtorch_cpu.so", "libc10.so", *(f.name for f in folder.glob("lib*_cuda*.so"))):
        with opened(folder / name) as data:
            assert data is not None
            there |= set(symbols(data, defined=True))
            wanted |= set(symbols(data, defined=False)) if name == "libtorch_python.so" else set()
    ours = {name for name in wanted if name.startswith((b"_ZN3c10", b"_ZN2at", b"_ZN5torch"))}
    assert len(ours) > 1000 and not ours - there
