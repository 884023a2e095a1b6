"""What must not be lost, hang or be left behind when things go wrong. Each test really does it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import triton.language as tl

from powertrain.runtime import settings, tracing
from powertrain.runtime.compile import kernel_store, worker
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile.triton_compat import VERSION_TEXT
from powertrain.runtime.errors import CompileError, CompileTimeout
from tests.runtime import kernels
from tests.runtime.kernels import descendants_of, fake_ptxas, run, spec_of, start, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux processes and mounts")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """This process with an empty store and no compiled kernels; the folder of the store."""
    folder = tmp_path / "store"
    monkeypatch.setenv("POWERTRAIN_STORE", str(folder))
    monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", "100")

    def forget() -> None:
        settings.reload()
        kernel_store.user_store.cache_clear()
        kernel_store.packs.cache_clear()
        compile_service.ptxas_version.cache_clear()
        compile_service._entries.clear()
        tracing.clear()
        compile_service.service().close()  # idle workers have the old environment

    forget()
    yield folder
    monkeypatch.undo()
    forget()


def compiled_here() -> str:
    """Where this process, with `fresh`, has the kernel from: as the next process would."""
    compile_service._entries.clear()
    return compile_service.entry_for(spec_of())[1]


def _is_clean(folder: Path) -> bool:
    """No process of ours left, no half-written entry in the store."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".ptk"]
    return not descendants_of(str(folder)) and not [path for path in files if path.parent.name != "locks"]


# stages: the worker has just been asked, and ptxas runs
@pytest.mark.parametrize("victim", ["process", "worker"])
def test_kill_9_in_ptxas_then_rerun(victim: str, fresh: Path, tmp_path: Path) -> None:
    ptxas = fake_ptxas(tmp_path, "exec sleep 600")
    process = start(tmp_path / "store", TRITON_PTXAS_PATH=ptxas)
    assert wait_until((tmp_path / "reached").exists)
    if victim == "process":
        process.kill()
    else:
        workers = [pid for pid in descendants_of(str(tmp_path)) if _parent(pid) == process.pid]
        os.kill(workers[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    if victim == "worker":
        assert "CompileError" in out and "SIGKILL" in out and "_twice_kernel for sm_80" in out
    assert wait_until(lambda: not descendants_of(str(tmp_path))), "an orphan was left"
    assert _is_clean(tmp_path / "store")
    (tmp_path / "armed").unlink()
    if victim == "process":
        assert run(tmp_path / "store", TRITON_PTXAS_PATH=ptxas)["source"] == "compiled"
    else:
        assert compiled_here() == "compiled"
        assert compiled_here() == "store"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# nothing of ours runs yet during the imports
@pytest.mark.parametrize("stage", [pytest.param("imports", marks=pytest.mark.slow), "lowering", "storing"])
def test_kill_9_at_other_stages_then_rerun(stage: str, fresh: Path, tmp_path: Path) -> None:
    """Killed as soon as a sign of the stage shows: a process, a worker, the store's folder."""
    folder = fresh
    signs = {
        "imports": lambda: True,
        "lowering": folder.exists,
        "storing": lambda: (folder / "locks").exists(),
    }
    process = start(folder)
    wait_until(lambda: signs[stage]() or process.poll() is not None)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until(lambda: not descendants_of(str(tmp_path))), "an orphan was left"
    assert _is_clean(folder)
    assert compiled_here() in ("compiled", "store")


def test_killed_owner_whose_forked_child_lives_on(tmp_path: Path) -> None:
    ptxas = fake_ptxas(tmp_path, "exec sleep 600")
    process = start(tmp_path / "store", "die", TRITON_PTXAS_PATH=ptxas)
    assert process.stdout is not None
    child = int(process.stdout.readline().partition(":")[2].strip(" }\n"))
    try:
        assert wait_until((tmp_path / "reached").exists)
        process.kill()
        process.wait(timeout=60)
        (tmp_path / "armed").unlink()
        os.kill(child, 0)  # it lives
        result = run(tmp_path / "store", TRITON_PTXAS_PATH=ptxas, POWERTRAIN_LOCK_TIMEOUT="100")
        assert result["source"] == "compiled"
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_spawning_thread_that_exits(fresh: Path) -> None:
    sources: list[str] = []
    for block in (128, 256):
        thread = threading.Thread(target=lambda b=block: sources.append(compile_service.entry_for(spec_of(block=b))[1]))
        thread.start()
        thread.join()
    assert sources == ["compiled", "compiled"]
    assert len(compile_service.service()._idle) == 1, "the second compile found the first one's worker alive"


def test_threads_share_one_compile(fresh: Path) -> None:
    sources: list[str] = []
    threads = [
        threading.Thread(target=lambda: sources.append(compile_service.entry_for(spec_of())[1])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sources) == ["compiled"] + ["memory"] * 7


def test_sixteen_processes_want_one_kernel(fresh: Path) -> None:
    pipes, children = [], []
    for _ in range(16):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(write, compile_service.entry_for(spec_of())[1].encode())
            finally:
                compile_service.service().close()
                os._exit(0)
        os.close(write)
        children.append(child)
        pipes.append(os.fdopen(read))
    sources = [pipe.read() for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    for child in children:
        os.waitpid(child, 0)
    assert sources.count("compiled") == 1, sources
    assert set(sources) <= {"compiled", "another process", "store"}


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign", "behind"])
def test_damaged_entries_are_rebuilt(damage: str, fresh: Path) -> None:
    spec = spec_of()
    entry, _ = compile_service.entry_for(spec)
    path = kernel_store.user_store().path(spec.key)
    data = path.read_bytes()
    middle = bytearray(data)
    middle[len(data) // 2] ^= 1
    path.write_bytes(
        {
            "empty": b"",
            "truncated": data[:-10],
            "flipped": bytes(middle),
            "foreign": data.replace(spec.key.encode(), b"0" * 64),
            "behind": data + b"more",
        }[damage]
    )
    compile_service._entries.clear()
    again, source = compile_service.entry_for(spec)
    assert source == "compiled" and again.members == entry.members
    warnings = [event.text for event in tracing.trace() if event.kind == "warning"]
    assert len(warnings) == 1 and str(path) in warnings[0] and "quarantine" in warnings[0]
    compile_service._entries.clear()
    assert compile_service.entry_for(spec)[1] == "store"


def test_every_cut_of_an_entry_is_noticed(fresh: Path) -> None:
    entry, _ = compile_service.entry_for(spec_of())
    data = entry.to_bytes()
    for cut in [*range(0, 120), *range(120, len(data), 97)]:
        with pytest.raises((kernel_store.Damaged, ValueError, KeyError)):
            kernel_store.Entry.from_bytes(entry.key, data[:cut])


def _mounted(folder: Path, mount: str, *args: str) -> dict:
    """Run the compile with a file system mounted for it alone."""
    folder.mkdir()
    environment = kernels.environment(folder)
    command = f"{mount} && exec {sys.executable} -m tests.runtime.kernels"
    finished = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], env=environment, cwd=kernels.ROOT, capture_output=True, text=True
    )
    if "mount" in finished.stderr or "unshare" in finished.stderr:
        pytest.skip(f"mounting is not permitted here: {finished.stderr.strip()}")
    return {"out": finished.stdout, "err": finished.stderr}


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_disk_full_or_read_only(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    size = {"full": f"mount -t tmpfs -o size=4k,mode=700 tmpfs {folder}"}
    mount = size.get(kind, f"mount -t tmpfs -o ro,mode=700 tmpfs {folder}")
    result = _mounted(folder, mount)
    assert '"source": "compiled"' in result["out"], result
    assert str(folder) in result["err"] and "memory only" in result["err"] and "POWERTRAIN_STORE" in result["err"]


def test_a_file_system_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(worker.fcntl, "flock", refuse)
    with worker.key_lock(tmp_path / "locks" / "k", deadline=1e12) as held:
        assert not held


def test_a_lock_whose_file_cannot_be_removed_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that became read-only meanwhile: the kernel that was compiled is not lost."""

    def refuse(*args: object, **_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with worker.key_lock(tmp_path / "locks" / "k", deadline=1e12) as held:
            assert held
    with worker.key_lock(tmp_path / "locks" / "k", deadline=0.0) as again:
        assert again


def test_a_lock_held_for_ever_is_waited_for_until_the_deadline_only(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "k"
    with worker.key_lock(path, deadline=1e12) as first:
        with worker.key_lock(path, deadline=0.0) as second:
            assert first and not second
        assert path.exists()
    assert not path.exists()
    with worker.key_lock(path, deadline=0.0) as third:
        assert third


@pytest.fixture
def ptxas_that(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a script in the place of ptxas, for the workers of this process."""

    def put(behaviour: str) -> None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", fake_ptxas(tmp_path, behaviour))
        settings.reload()

    return put


def test_a_compile_that_hangs(
    ptxas_that: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", "2")
    monkeypatch.setattr(compile_service, "_LOG_AFTER", 1.0)
    ptxas_that("exec sleep 600")
    with pytest.raises(CompileTimeout, match="_twice_kernel for sm_80 did not compile within 2 s") as raised:
        compile_service.entry_for(spec_of())
    assert "POWERTRAIN_COMPILE_TIMEOUT" in str(raised.value)
    assert "compiling _twice_kernel for sm_80" in capfd.readouterr().err, "no progress line"
    assert wait_until(lambda: not descendants_of(str(tmp_path)))


def test_a_compile_that_aborts(ptxas_that: Callable[[str], None], tmp_path: Path) -> None:
    ptxas_that("kill -ABRT $PPID; exec sleep 600")
    with pytest.raises(CompileError, match="SIGABRT") as raised:
        compile_service.entry_for(spec_of())
    assert "_twice_kernel for sm_80" in str(raised.value)
    assert wait_until(lambda: not descendants_of(str(tmp_path)))


def test_a_compile_that_fails(ptxas_that: Callable[[str], None]) -> None:
    ptxas_that("echo broken >&2; exit 3")
    with pytest.raises(CompileError, match=r"(?s)error code 3.*broken|broken.*error code 3"):
        compile_service.entry_for(spec_of())


def test_no_compiler_on_path(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert compile_service.entry_for(spec_of())[1] == "compiled"


def test_fallback_to_plain_pytorch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.runtime import dispatch, op_names

    monkeypatch.setattr(op_names, "OPS", (*op_names.OPS, "some_op"))
    calls = []

    @dispatch.falls_back("some_op")
    def some_op() -> str:
        calls.append(dispatch.is_disabled("some_op"))
        if not calls[-1]:
            raise CompileTimeout("_k for sm_80 did not compile")
        return "plain"

    with pytest.raises(CompileTimeout):
        some_op()
    monkeypatch.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    settings.reload()
    assert some_op() == "plain" and calls == [False, False, True]
    assert "some_op is computed by plain PyTorch" in tracing.trace()[-1].text


def test_leftover_folders_of_dead_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.tempfile, "tempdir", str(tmp_path))
    dead, living, never_taken, young = (worker.make_folder() for _ in range(4))
    os.close(worker.own(dead))
    owner = worker.own(living)
    os.utime(never_taken, (0, 0))
    new = worker.make_folder()
    assert not dead.exists() and not never_taken.exists() and living.exists() and young.exists() and new.exists()
    os.close(owner)


def test_many_processes_remove_the_same_leftover_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with 14 processes on one host: a folder listed by one is removed by another before it looks at it."""
    monkeypatch.setattr(worker.tempfile, "tempdir", str(tmp_path))
    left = [worker.make_folder() for _ in range(3)]
    paths, listed = list(tmp_path.iterdir()), Path.glob

    def vanish(parent: Path, pattern: str) -> list[Path]:
        found = list(listed(parent, pattern))
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "glob", vanish)
    assert worker.make_folder() not in paths


def test_a_world_writable_store_is_refused(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    _, source = compile_service.entry_for(spec_of())
    assert source == "compiled" and not list(kernel_store.user_store().keys())
    assert any("written by everybody" in e.text and "chmod o-w" in e.text for e in tracing.trace())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_foreign_store_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir()
    os.chown(fresh, 12345, 12345)
    assert compile_service.entry_for(spec_of())[1] == "compiled"
    assert any("belongs to user 12345" in e.text for e in tracing.trace())


def test_a_kernel_that_is_not_valid_triton(fresh: Path) -> None:
    from powertrain.runtime.launch import kernel

    @kernel()
    def _broken_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, unknown_name)  # noqa: F821

    with pytest.raises(CompileError, match=r"(?s)_broken_kernel for sm_80 is not valid Triton: .*unknown_name"):
        compile_service.entry_for(spec_of(_broken_kernel))


@pytest.mark.skipif(VERSION_TEXT >= "3.8", reason="its LLVM reports this error instead of exiting")
def test_a_kernel_at_which_llvm_ends_the_process(fresh: Path) -> None:
    """Not an exception: LLVM's fatal errors exit or abort, and would take a training process along."""
    from powertrain.runtime.launch import kernel

    @kernel()
    def _fatal_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        x = tl.load(x_ptr + tl.arange(0, BLOCK))
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=Z,Z", [x], dtype=tl.float32, is_pure=True, pack=1)
        tl.store(y_ptr + tl.arange(0, BLOCK), y)

    with pytest.raises(CompileError, match=r"(?s)_fatal_kernel for sm_80 died .*constraint 'Z'"):
        compile_service.entry_for(spec_of(_fatal_kernel))
    assert compile_service.entry_for(spec_of())[1] == "compiled", "the next compile finds a living worker"
