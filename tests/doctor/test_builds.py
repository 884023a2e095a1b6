"""Locks that nobody holds: found, told from live ones, and ended."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.doctor import builds
from powertrain.runtime.machine import Machine
from tests.doctor.machines import machine, told


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process and its children, with a home, a work folder and packages of its own.

    Not all of this machine's processes: tests that run beside these start some in folders with locks.
    """
    every = Machine.processes

    def own(machine: Machine) -> Iterator[Path]:
        for path in every(machine):
            status = machine.read(str(path / "status")) or ""
            if path.name == str(os.getpid()) or f"PPid:\t{os.getpid()}\n" in status:
                yield path

    monkeypatch.setattr(Machine, "processes", own)
    return replace(Machine.here(), variables={}, cwd=tmp_path / "work", home=tmp_path / "home", packages=())


def _lock(folder: Path) -> Path:
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.touch()
    return lock


def test_nothing_is_locked(here: Machine) -> None:
    (finding,) = builds.builds(here)
    assert finding.level == "ok" and "no build is locked" in finding.message


@pytest.mark.parametrize(
    "folder",
    [
        "home/.cache/torch_extensions/py311_cu128/fused",
        "work/megatron/fused_kernels/build",
        "home/.cache/torch_extensions/x",
    ],
)
def test_a_stale_lock_is_found_and_renamed(here: Machine, tmp_path: Path, folder: str) -> None:
    lock = _lock(tmp_path / folder)
    (finding,) = builds.builds(here)
    assert finding.level == "problem" and "locked by nobody" in finding.message and str(lock) in (finding.fix or "")
    assert lock.exists(), "finding it must change nothing"
    assert finding.apply and "renamed to lock.stale-" in finding.apply()
    assert not lock.exists() and len(list(lock.parent.glob("lock.stale-*"))) == 1
    assert "is gone already" in finding.apply()


def test_torch_extensions_dir(here: Machine, tmp_path: Path) -> None:
    lock = _lock(tmp_path / "elsewhere" / "fused")
    assert "no build is locked" in told(builds.builds(here))
    chosen = replace(here, variables={"TORCH_EXTENSIONS_DIR": str(tmp_path / "elsewhere")})
    assert str(lock) in told(builds.builds(chosen))


def test_the_folder_a_running_training_works_in(here: Machine, tmp_path: Path) -> None:
    lock = _lock(tmp_path / "gpt-neox" / "megatron/fused_kernels/build")
    training = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        cwd=tmp_path / "gpt-neox", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert training.stdout and training.stdout.readline()
        assert str(lock) in told(builds.builds(here))
    finally:
        training.kill()
        training.communicate()


def test_a_live_builder_is_left_alone(here: Machine, tmp_path: Path) -> None:
    lock = _lock(tmp_path / "work/megatron/fused_kernels/build")
    (stale,) = builds.builds(here)
    lock.unlink()
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton takes it
    try:
        (finding,) = builds.builds(here)
        assert finding.level == "ok" and f"being built by process {os.getpid()}" in finding.message
        assert stale.apply and "left alone" in stale.apply() and lock.exists()
    finally:
        os.close(descriptor)


def test_a_network_file_system_is_not_judged_from_here(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(f"server:/home {tmp_path} nfs4 rw 0 0\n")
    _lock(tmp_path / "work/megatron/fused_kernels/build")
    (finding,) = builds.builds(machine(tmp_path))
    assert finding.level == "warning" and finding.apply is None and "nfs4" in finding.message


def test_processes_that_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lock(tmp_path / "work/megatron/fused_kernels/build")
    (tmp_path / "proc/4711/fd").mkdir(parents=True)

    def denied(self: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", denied)
    (finding,) = builds.builds(machine(tmp_path))
    assert finding.level == "warning" and finding.apply is None and "sudo fuser -v" in (finding.fix or "")


@pytest.mark.parametrize("seconds, words", [(3, "3 s"), (600, "10 min"), (36000, "10 h"), (864000, "10 d")])
def test_ages(seconds: float, words: str) -> None:
    assert builds._age(seconds) == words


def test_the_hang_of_gpt_neox_and_its_end(tmp_path: Path) -> None:
    """torch's own loader waits for the lock of a builder that was killed; the doctor, run in its folder, ends it."""
    build = tmp_path / "megatron" / "fused_kernels" / "build"
    lock = _lock(build)
    # what the dead builder had already linked, so that nothing is compiled here
    (tmp_path / "fused.c").write_text("int powertrain_test = 1;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", build / "fused.so", tmp_path / "fused.c"], check=True)
    load = (
        "from torch.utils.cpp_extension import load; print('loading', flush=True)\n"
        f"load('fused', [{str(tmp_path / 'fused.c')!r}], build_directory={str(build)!r}, is_python_module=False)\n"
        "print('loaded', flush=True)\n"
    )
    waiting = subprocess.Popen([sys.executable, "-c", load], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout and waiting.stdout.readline() == "loading\n"
        _until_asleep(waiting.pid)
        assert waiting.poll() is None and lock.exists()
        cured = subprocess.run(
            [sys.executable, "-m", "powertrain", "doctor", "--fix", "--only", "builds"],
            cwd=tmp_path, capture_output=True, text=True, env=_with_our_package(),
        )  # fmt: skip
        assert cured.returncode == 1 and f"done: {lock}: renamed to lock.stale-" in cured.stdout, cured
        assert waiting.stdout.readline() == "loaded\n" and waiting.wait(60) == 0
    finally:
        waiting.kill()
        waiting.communicate()


def _until_asleep(pid: int) -> None:
    """Until a process does nothing but wait: no CPU time in a fifth of a second."""
    before, now = -1.0, 0.0
    while before != now:
        before = now
        time.sleep(0.2)
        now = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def _with_our_package() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
