"""A kernel store and packs of any bytes, behind anybody's folders: refused, said, compiled again; nothing waits."""

import json
import os
import random
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.runtime import atomic_file, tracing
from powertrain.runtime.compile import kernel_store
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile.kernel_store import Damaged, Entry, Pack, Store
from powertrain.runtime.errors import StoreError
from tests.runtime.kernels import spec_of
from tests.runtime.test_faults import fresh  # noqa: F401

KEY, OTHER = "ab" + "1" * 62, "cd" + "2" * 62
ENTRY = Entry(
    KEY, {"kernel": "_k", "arch": 80, "launch": {"shared": 0}}, {"cubin": b"\x7fELF" * 100, "ptx": b"//" * 50}
)


def _warnings() -> list[str]:
    return [event.text for event in tracing.trace() if event.kind == "warning"]


def _filled(root: Path) -> Store:
    home = Store(root).open()
    assert home.put(ENTRY) and home.get(KEY) == ENTRY
    tracing.clear()
    return home


def _mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out))
        way = chance.choice(["bit", "huge", "cut", "insert"])
        if way == "bit":
            out[at] ^= 1 << chance.randrange(8)
        elif way == "huge":
            out[at : at + 4] = b"\xff\xff\xff\xff"
        elif way == "cut" and at > 4:
            del out[at:]
        else:
            out[at:at] = chance.randbytes(chance.randint(1, 30))
    return bytes(out)


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_entries(count: int, tmp_path: Path) -> None:
    chance, home, whole = random.Random(6), _filled(tmp_path / "store"), ENTRY.to_bytes()
    for _ in range(count):
        data = _mutated(whole, chance)
        home.path(KEY).write_bytes(data)
        assert home.get(KEY) == (ENTRY if data == whole else None)
        assert home.put(ENTRY) and home.get(KEY) == ENTRY


@pytest.mark.parametrize(
    "manifest",
    ["[]", "1", "null", "{}", '{"key": 1, "members": 3}', '{"key": "K", "members": [1]}', "[" * 100_000,
     '{"key": "K", "members": [{"name": "cubin", "size": -5, "sha256": "x"}]}',
     '{"key": "K", "members": [{"name": [], "size": 1e999, "sha256": 5}]}',
     '{"key": "K", "members": [{"name": "cubin", "size": 99999999999999999999, "sha256": "x"}]}'],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_manifests_of_other_shapes(manifest: str) -> None:
    """With the right checksum: written by another program."""
    import hashlib

    text = manifest.replace("K", KEY).encode()
    data = kernel_store._MAGIC + struct.pack("<Q32s", len(text), hashlib.sha256(text).digest()) + text
    with pytest.raises(Damaged):
        Entry.from_bytes(KEY, data)


def _be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _be_a_link(path: Path) -> None:
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _be_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _be_a_socket(path: Path) -> None:
    import socket

    path.unlink()
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)
        one.bind(path.name)


def _be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _be_large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


def _be_foreign(path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root to give a file away")
    os.chown(path, 12345, 12345)


_FILES: list[Callable[[Path], None]] = [
    _be_a_pipe, _be_a_link, _be_zero, _be_a_socket, _be_a_folder, _be_large, _be_foreign,
    lambda path: path.chmod(0o666),
]  # fmt: skip


@pytest.mark.parametrize("become", _FILES, ids=lambda f: f.__name__)
def test_what_is_no_file_of_ours_is_set_aside(
    become: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = _filled(tmp_path / "store")
    become(home.path(KEY))
    assert home.get(KEY) is None
    (said,) = _warnings()
    assert str(home.path(KEY)) in said and "quarantine" in said and len(said) < 900
    assert home.put(ENTRY) and home.get(KEY) == ENTRY
    assert home.clear() >= 1


def _linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


_FOLDERS: list[Callable[[Path], None]] = [_be_foreign, _linked, lambda path: path.chmod(0o777)]


@pytest.mark.parametrize("become", _FOLDERS, ids=lambda f: f.__name__)
def test_folders_that_others_can_write_are_refused(become: Callable[[Path], None], tmp_path: Path) -> None:
    home = _filled(tmp_path / "store")
    become(home.path(KEY).parent)
    assert home.get(KEY) is None and not home.put(ENTRY)
    (said,) = _warnings()
    assert str(home.path(KEY).parent) in said and "refused" in said and home.trouble is None
    with pytest.raises(StoreError):
        home.read(KEY)
    other = Entry(OTHER, ENTRY.manifest, ENTRY.members)
    assert home.put(other) and home.get(OTHER) == other, "other folders serve"


def test_an_unreachable_home(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def unreachable(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        for name in ("mkdir", "stat", "lstat"):
            patched.setattr(Path, name, unreachable)
        home = Store(fresh).open()
        assert home.trouble == "Permission denied" and home.get(KEY) is None and not home.put(ENTRY)
    (said,) = _warnings()
    assert "memory only" in said


def test_a_rebuild_in_a_store_that_cannot_be_written_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    spec = spec_of()
    compile_service.entry_for(spec)
    parent = kernel_store.user_store().path(spec.key).parent
    if os.getuid():
        parent.chmod(0o500)
        entry, source = compile_service.entry_for(spec, again=True)
    else:  # root writes everywhere but into what is no folder
        parent.rename(parent.with_name("aside"))
        parent.touch()
        entry, source = compile_service.entry_for(spec, again=True)
    assert source == "compiled" and entry.members["cubin"]


@pytest.mark.parametrize("writes", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_writers_without_nameless_files_do_not_disturb_each_other(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: each looks for stale temporary files while the others rename theirs."""
    import threading

    monkeypatch.delattr(os, "O_TMPFILE")
    failed: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for each in range(writes // 4):
                atomic_file.write_whole(tmp_path / f"{number}-{each % 7}", b"x" * 100)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(list(tmp_path.iterdir())) == 28


def test_stale_files_are_removed_and_young_ones_are_not(tmp_path: Path) -> None:
    stale, young = tmp_path / ".a.tmp", tmp_path / ".b.tmp"
    stale.touch()
    young.touch()
    os.utime(stale, (0, 0))
    atomic_file._write(tmp_path / "new", b"x", 0o600, nameless=False)
    assert not stale.exists() and young.exists()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


# packs


def _pack(path: Path) -> bytes:
    kernel_store.write_pack(path, [ENTRY, Entry(OTHER, ENTRY.manifest, ENTRY.members)], {"triton": "3.6.0"})
    return path.read_bytes()


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_packs(count: int, tmp_path: Path) -> None:
    chance, path = random.Random(8), tmp_path / "kernels.ptp"
    whole = _pack(path)
    for _ in range(count):
        path.write_bytes(_mutated(whole, chance))
        try:
            pack = Pack(path)
        except StoreError as error:
            assert str(path) in str(error) and len(str(error)) < 600
            continue
        for key in list(pack.keys()):
            assert pack.get(key) in (None, ENTRY, Entry(OTHER, ENTRY.manifest, ENTRY.members))


@pytest.mark.parametrize("manifest", ["[]", "3", "null", "[" * 100_000, "{", ""], ids=lambda text: text[:10])
def test_packs_whose_manifest_is_another_thing(manifest: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.ptp"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pack.json", manifest)
    with pytest.raises(StoreError, match="not a pack"):
        Pack(path)


def test_packs_that_unpack_to_more_than_they_are(tmp_path: Path) -> None:
    path = tmp_path / "kernels.ptp"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack.json", json.dumps({"triton": "3.6.0", "pad": " " * (64 << 20)}))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(StoreError, match="stored as it is"):
        Pack(path)


def test_packs_that_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "kernels.ptp"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(StoreError):
            Pack(path)


def test_a_pack_read_on_both_sides_of_a_fork(tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """An open file has one position for parent and child."""
    from powertrain.runtime import settings
    from powertrain.runtime.compile.triton_compat import VERSION_TEXT

    path = tmp_path / "kernels.ptp"
    keys = [f"{number:064x}" for number in range(64)]
    entries = [Entry(key, {}, {"cubin": os.urandom(9000)}) for key in keys]
    kernel_store.write_pack(path, entries, {"triton": VERSION_TEXT})
    monkeypatch.setenv("POWERTRAIN_PACKS", str(path))
    settings.reload()
    kernel_store.packs.cache_clear()

    def read() -> bool:
        return all(
            kernel_store.find(key) == (entry, "pack")
            for _ in range(8)
            for key, entry in zip(keys, entries, strict=True)
        )

    assert read()
    pid = os.fork()
    if not pid:
        os._exit(0 if read() else 1)
    fine = read()
    assert os.waitpid(pid, 0)[1] == 0 and fine
