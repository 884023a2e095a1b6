"""Compiled kernels on disk: content-addressed, one checksummed file an entry, layered over read-only packs.

    <root>/<2 hex>/<key>.ptk     an entry
    <root>/quarantine/           entries that were damaged, kept for a look
    <root>/locks/<key>           flock()ed by the worker that compiles the key; existing means nothing

An entry appears whole or not at all (atomic_file.py). A damaged entry, or another file in its place, is moved to
quarantine, logged once, and rebuilt. If the store cannot be written (read-only, full), that is logged once and kernels
stay in memory. Code is loaded only from folders and files that no other user can write: machine code is not checked.
"""

import errno
import hashlib
import json
import os
import re
import stat
import struct
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import write_whole
from powertrain.runtime.errors import StoreError
from powertrain.runtime.settings import settings

SCHEMA = 1
_MAGIC = b"PTKERNEL%d\n" % SCHEMA
_HEAD = struct.Struct("<Q32s")  # manifest length, sha256 of the manifest
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.ptk")
_MANIFEST_NAME = "pack.json"
# bytes of an entry; the largest of ours have less than 2 MiB
_MOST = 256 << 20
_MOST_MANIFEST = 16 << 20
REFUSED = "refused"  # the trouble of a store that other users could have written


class Damaged(Exception):
    """The bytes are not a whole entry; the message gives the defect."""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel: `manifest` (kernel, arch, versions, launch facts) and `members` (cubin, ptx)."""

    key: str
    manifest: dict[str, Any]
    members: dict[str, bytes]

    def to_bytes(self) -> bytes:
        index = [
            {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in self.members.items()
        ]
        manifest = json.dumps({**self.manifest, "key": self.key, "members": index}, sort_keys=True).encode()
        head = _HEAD.pack(len(manifest), hashlib.sha256(manifest).digest())
        return b"".join((_MAGIC, head, manifest, *self.members.values()))

    @staticmethod
    def from_bytes(key: str, data: bytes) -> "Entry":
        """Raises Damaged for anything but the whole entry of this key."""
        start = len(_MAGIC) + _HEAD.size
        if len(data) < start or not data.startswith(_MAGIC):
            raise Damaged("it is empty, cut short or no kernel entry")
        length, digest = _HEAD.unpack_from(data, len(_MAGIC))
        text = data[start : start + length]
        if hashlib.sha256(text).digest() != digest:
            raise Damaged("its manifest fails the checksum")
        try:
            manifest = json.loads(text)
            stored_key, index = manifest.pop("key"), manifest.pop("members")
            sizes = [(str(member["name"]), int(member["size"]), member["sha256"]) for member in index]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged(f"its manifest is not an entry's ({type(error).__name__}: {error})") from None
        if stored_key != key:
            raise Damaged("it is the entry of another key")
        members, at = {}, start + length
        for name, size, checksum in sizes:
            part = data[at : at + max(0, size)]
            if hashlib.sha256(part).hexdigest() != checksum:
                raise Damaged(f"its {name} fails the checksum")
            members[name] = part
            at += len(part)
        # a shorter file written over a longer one would else pass
        if at != len(data):
            raise Damaged("it has extra bytes at its end")
        return Entry(key, manifest, members)


def distrust(path: Path, facts: os.stat_result | None = None) -> str | None:
    """Why code must not be loaded from this folder or file: other users could have written it."""
    facts = path.stat() if facts is None else facts
    # code is loaded from here: who may write it may run code as this user
    if facts.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody; run `chmod o-w {path}`"
    if facts.st_uid not in (os.getuid(), 0):
        return (
            f"{path} belongs to user {facts.st_uid}, not to you ({os.getuid()}); choose another with POWERTRAIN_STORE"
        )
    return None


def _read(path: Path) -> bytes:
    """A file that only this user can have written. Raises Damaged for a link, a pipe or a device, FileNotFoundError."""
    try:
        # O_NOFOLLOW: a link could point to another user's file; O_NONBLOCK: opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged("it is no regular file") from None
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise Damaged("it is no regular file")
    with open(descriptor, "rb") as file:
        if reason := distrust(path, facts):
            raise Damaged(reason)
        if facts.st_size > _MOST:
            raise Damaged(f"it has {facts.st_size} bytes, more than any entry")
        return file.read(facts.st_size)


@dataclass
class Store:
    """A folder of entries that this user may write."""

    root: Path
    trouble: str | None = field(default=None)  # why it is not written any more

    def open(self) -> "Store":
        """Make the folder if need be; raise StoreError if it must not be trusted."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = distrust(self.root)
        except OSError as error:
            self.give_up(error)
            return self
        if reason:
            raise StoreError(f"kernel store refused: {reason}")
        return self

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.ptk"

    def lock_path(self, key: str) -> Path:
        return self.root / "locks" / key

    def read(self, key: str) -> Entry | None:
        """An entry; None: there is none. Raises Damaged, or StoreError where its folder must not be trusted."""
        path = self.path(key)
        try:
            self._trust(path.parent)
            return Entry.from_bytes(key, _read(path))
        except OSError:
            return None

    def _trust(self, folder: Path) -> None:
        """If only we can write the root, only we can write the folders in it."""
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise StoreError(f"kernel store: {folder} refused: it must be a folder, and no link to one; remove it")
        if reason := distrust(folder, facts):
            raise StoreError(f"kernel store: {folder} refused: {reason}")

    def get(self, key: str) -> Entry | None:
        try:
            return self.read(key)
        except StoreError as error:
            tracing.warn(f"{error}; its entries are not used")
        except Damaged as error:
            self.quarantine(key, str(error))
        return None

    def put(self, entry: Entry) -> bool:
        """Write an entry, in place of one that is there; False (logged once) where the disk does not let us."""
        if self.trouble:
            return False
        path = self.path(entry.key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._trust(path.parent)
            # under a temporary name and renamed: readers see a whole entry or none
            write_whole(path, entry.to_bytes(), 0o600)
        except StoreError:
            # logged when the entry was read
            return False
        except OSError as error:
            self.give_up(error)
            return False
        return True

    def quarantine(self, key: str, why: str) -> None:
        """Move a damaged entry aside, so that it is rebuilt."""
        path, aside = self.path(key), self.root / "quarantine" / f"{key}.{uuid.uuid4().hex[:8]}"
        try:
            aside.parent.mkdir(mode=0o700, exist_ok=True)
            # kept, not deleted: a disk that damages files is to be seen
            os.replace(path, aside)
            where = f"moved to {aside}"
        except OSError as error:
            where = f"could not be moved ({error.strerror})"
        tracing.warn(f"kernel store: {path} is damaged ({why}); {where}; the kernel is compiled again")

    def keys(self) -> Iterator[str]:
        for path in sorted(self.root.glob("[0-9a-f][0-9a-f]/*.ptk")):
            yield path.stem

    def clear(self) -> int:
        """Delete every entry and everything in quarantine; how many files that was."""
        paths = [*self.root.glob("[0-9a-f][0-9a-f]/*.ptk"), *self.root.glob("quarantine/*")]
        ours = [path for path in paths if not path.parent.is_symlink() and (path.is_symlink() or not path.is_dir())]
        for path in ours:
            path.unlink(missing_ok=True)
        return len(ours)

    def give_up(self, error: OSError) -> None:
        self.trouble = error.strerror or str(error)
        tracing.warn(
            f"kernel store {self.root}: cannot be written ({self.trouble}); kernels compiled now live in memory only. "
            "Free disk space or set POWERTRAIN_STORE to a folder you can write"
        )


class Pack:
    """A read-only collection of entries in one zip file, made by `powertrain prebuild`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError("it is no regular file")
            if reason := distrust(path):
                raise StoreError(f"kernel pack refused: {reason}")
            self._zip = zipfile.ZipFile(path)
            names = self._zip.namelist()
            self.manifest = json.loads(self._member(_MANIFEST_NAME, _MOST_MANIFEST))
            if not isinstance(self.manifest, dict):
                raise ValueError(f"{_MANIFEST_NAME} must be an object")
        except StoreError:
            raise
        except Exception as error:  # zipfile raises a dozen kinds over bytes that are not its own
            reason = f"{type(error).__name__}: {error}"[:200]  # some errors quote their input
            raise StoreError(
                f"kernel pack {path}: not a pack ({reason}); build it again with `powertrain prebuild`"
            ) from None
        bad = [name for name in names if name != _MANIFEST_NAME and not _ENTRY_NAME.fullmatch(name)]
        if bad:
            raise StoreError(f"kernel pack {path} refused: it holds {bad[0]!r}, which is no kernel entry")
        self._keys = {name.removesuffix(".ptk") for name in names}

    def _member(self, name: str, most: int) -> bytes:
        # the size is known before anything is read: a small zip may claim gigabytes
        info = self._zip.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
            raise Damaged(f"{name} must be stored as it is, in at most {most} bytes, got {info.file_size}")
        return self._zip.read(info)

    def get(self, key: str) -> Entry | None:
        if key not in self._keys:
            return None
        try:
            return Entry.from_bytes(key, self._member(f"{key}.ptk", _MOST))
        except Exception as error:  # zipfile's kinds, as above
            # so that it is reported once
            self._keys.discard(key)
            problem = f"entry {key[:12]} is damaged ({error!s:.200})"
            tracing.warn(f"kernel pack {self.path}: {problem}; the kernel is compiled here")
            return None

    def keys(self) -> Iterator[str]:
        yield from sorted(self._keys - {_MANIFEST_NAME})


def write_pack(path: Path, entries: list[Entry], manifest: dict[str, Any]) -> None:
    """Write a pack under a temporary name and rename it; the same entries give the same bytes."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        # sorted, stored and with a fixed date: the same entries give the same bytes
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            parts = {f"{entry.key}.ptk": entry.to_bytes() for entry in sorted(entries, key=lambda entry: entry.key)}
            for name, data in {_MANIFEST_NAME: json.dumps(manifest, sort_keys=True).encode(), **parts}.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def default_root() -> Path:
    """Folder of the store: POWERTRAIN_STORE, or the user's cache folder."""
    if settings().store:
        return Path(settings().store or "")
    import platformdirs

    return Path(platformdirs.user_cache_dir("powertrain")) / "kernels"


@cache
def user_store() -> Store:
    """This user's store; refused ones are logged once and replaced by memory."""
    store = Store(default_root())
    try:
        return store.open()
    except StoreError as error:
        tracing.warn(f"{error}; kernels live in memory only")
        return Store(Path(os.devnull) / "none", trouble=REFUSED)


@cache
def packs() -> tuple[Pack, ...]:
    """The packs named by POWERTRAIN_PACKS; an unusable one is logged once and left out."""
    from powertrain.runtime.compile.triton_compat import VERSION_TEXT

    files = []
    for name in settings().packs:
        try:
            pack = Pack(Path(name))
        except StoreError as error:
            tracing.warn(str(error))
            continue
        # the version is part of every key, so no lookup could succeed
        if pack.manifest.get("triton") != VERSION_TEXT:
            tracing.warn(
                f"kernel pack {name} was built by Triton {pack.manifest.get('triton')}, this is {VERSION_TEXT}: "
                "none of its kernels fits; build it again with `powertrain prebuild`"
            )
            continue
        files.append(pack)
    return tuple(files)


if hasattr(os, "register_at_fork"):
    # a forked child shares the file position of an open pack with its parent, so it opens its own
    os.register_at_fork(after_in_child=packs.cache_clear)


def find(key: str) -> tuple[Entry, str] | None:
    """An entry and where it was found, "pack" or "store"."""
    for pack in packs():
        if entry := pack.get(key):
            return entry, "pack"
    entry = user_store().get(key)
    return (entry, "store") if entry else None
