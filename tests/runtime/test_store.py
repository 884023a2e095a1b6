"""Entries, packs and keys."""

import os
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import triton.language as tl

from powertrain.runtime import atomic_file, settings, tracing
from powertrain.runtime.compile import kernel_store
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.errors import StoreError
from powertrain.runtime.launch import kernel
from tests.runtime.kernels import _twice_kernel, spec_of
from tests.runtime.test_faults import fresh  # noqa: F401


def _pack(folder: Path, **manifest: str) -> Path:
    entry, _ = compile_service.entry_for(spec_of())
    path = folder / "kernels.ptp"
    kernel_store.write_pack(path, [entry], {"triton": store_version(), **manifest})
    return path


def store_version() -> str:
    from powertrain.runtime.compile.triton_compat import VERSION_TEXT

    return VERSION_TEXT


def _use_pack(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERTRAIN_PACKS", str(path))
    monkeypatch.setenv("POWERTRAIN_STORE", str(path.parent / "other-store"))
    settings.reload()
    kernel_store.packs.cache_clear()
    kernel_store.user_store.cache_clear()
    compile_service._entries.clear()
    tracing.clear()


def test_an_entry_survives_its_bytes() -> None:
    entry = kernel_store.Entry("a" * 64, {"kernel": "k", "launch": {"shared": 3}}, {"cubin": b"\0\1", "ptx": b""})
    assert kernel_store.Entry.from_bytes("a" * 64, entry.to_bytes()) == entry


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path, nameless: bool) -> None:
    """Not by its temporary name."""
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    for path, kind in ((tmp_path / "taken", IsADirectoryError), (tmp_path / "no" / "file", FileNotFoundError)):
        with pytest.raises(kind) as caught:
            new = atomic_file.AtomicFile(path, nameless=nameless)
            try:
                new.publish()
            finally:
                new.discard()
        assert caught.value.filename == str(path) and ".tmp" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_pack_is_read(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    _use_pack(_pack(tmp_path), monkeypatch)
    assert compile_service.entry_for(spec_of())[1] == "pack"


def test_equal_entries_make_equal_packs(fresh: Path, tmp_path: Path) -> None:  # noqa: F811
    first = _pack(tmp_path).read_bytes()
    assert _pack(tmp_path).read_bytes() == first


def test_a_pack_for_another_version(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    _use_pack(_pack(tmp_path, triton="3.0.0"), monkeypatch)
    assert compile_service.entry_for(spec_of())[1] == "compiled"
    assert any("built by Triton 3.0.0" in e.text and "prebuild" in e.text for e in tracing.trace())


def test_a_pack_whose_path_climbs_out_is_refused(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = _pack(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../evil.ptk", b"x")
    with pytest.raises(StoreError, match=r"refused: it holds '\.\./\.\./evil\.ptk'"):
        kernel_store.Pack(path)
    _use_pack(path, monkeypatch)
    assert compile_service.entry_for(spec_of())[1] == "compiled"


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\5\6" + bytes(18)], ids=["empty", "text", "no manifest"])
def test_what_is_no_pack_is_said(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.ptp"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="not a pack"):
        kernel_store.Pack(path)


def test_a_damaged_entry_in_a_pack_is_compiled_here(
    fresh: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = _pack(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PTKERNEL") + 200] ^= 1
    path.write_bytes(data)
    _use_pack(path, monkeypatch)
    assert compile_service.entry_for(spec_of())[1] == "compiled"
    assert any("is damaged" in e.text for e in tracing.trace())


def test_two_triton_versions_on_one_store(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    compile_service.entry_for(spec_of())
    monkeypatch.setattr(compile_service, "VERSION_TEXT", "3.99.0")
    assert compile_service.entry_for(spec_of())[1] == "compiled"
    assert len(list(kernel_store.user_store().keys())) == 2
    compile_service._entries.clear()
    assert compile_service.entry_for(spec_of())[1] == "store"
    monkeypatch.undo()


def test_the_key_knows_code_and_not_comments() -> None:
    @kernel()
    def _twice_kernel_commented(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        # a comment
        cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)  # and another
        tl.store(y_ptr + cols, x + x, mask=cols < n)

    @kernel()
    def _thrice_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
        tl.store(y_ptr + cols, x + x + x, mask=cols < n)

    from powertrain.runtime.compile.triton_compat import _tokens

    def body(k: object) -> str:
        return _tokens(k.fn).partition(":")[2].partition(";")[2]

    assert body(_twice_kernel_commented) == body(_twice_kernel) != body(_thrice_kernel)


def test_the_key_knows_called_functions_and_constants() -> None:
    from powertrain.ops import norm_fwd_kernels
    from powertrain.runtime.compile.triton_compat import source_hash

    before = norm_fwd_kernels._norm_fwd_kernel.source_hash
    kept = norm_fwd_kernels._affine
    try:
        norm_fwd_kernels._affine = norm_fwd_kernels._inside
        assert source_hash(norm_fwd_kernels._norm_fwd_kernel.fn) != before
    finally:
        norm_fwd_kernels._affine = kept
    assert source_hash(norm_fwd_kernels._norm_fwd_kernel.fn) == before


def test_a_namedtuple_is_part_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels fill NamedTuples by position, so another order of fields is another kernel."""
    from powertrain.ops.attention.triton import scores
    from powertrain.ops.attention.triton.forward import _attention_fwd_kernel
    from powertrain.runtime.compile.triton_compat import source_hash

    before = source_hash(_attention_fwd_kernel.fn)
    monkeypatch.setattr(scores, "Bias", namedtuple("Bias", scores.Bias._fields[::-1]))
    assert source_hash(_attention_fwd_kernel.fn) != before


def test_specializations_have_keys_of_their_own() -> None:
    keys = {spec_of(arch=arch, block=block).key for arch in (80, 90) for block in (64, 128)}
    assert len(keys) == 4


def test_clear_and_list(fresh: Path) -> None:  # noqa: F811
    compile_service.entry_for(spec_of())
    home = kernel_store.user_store()
    assert list(home.keys()) == [spec_of().key]
    assert home.clear() == 1 and not list(home.keys())


def test_an_entry_appears_whole_without_a_second_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has nameless files, nothing is left behind by a kill at any moment."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        pytest.skip(f"no O_TMPFILE here: {error}")
    monkeypatch.setattr(os, "replace", lambda source, target: pytest.fail("took the way with a temporary name"))
    atomic_file.write_whole(tmp_path / "entry", b"all of it")
    assert (tmp_path / "entry").read_bytes() == b"all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


@pytest.mark.parametrize("nameless", [True, False])
def test_a_full_disk_leaves_no_temporary_file(nameless: bool, tmp_path: Path) -> None:
    """`close` flushes the buffer, which fails as the write did."""
    code = (
        "import resource, pathlib, sys\n"
        "from powertrain.runtime.atomic_file import write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "if sys.argv[2] == 'False':\n    import os\n    del os.O_TMPFILE\n"
        "write_whole(pathlib.Path(sys.argv[1]), b'x' * 10000)\n"
    )
    (tmp_path / "entry").write_bytes(b"the old one")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "entry"), str(nameless)], capture_output=True, text=True
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("entry", b"the old one")]
