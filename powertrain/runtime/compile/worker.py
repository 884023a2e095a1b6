"""A compile worker: reads TTIR from its parent, writes kernel entries. Imports triton, never torch, never user code.

A worker dies with its parent (PR_SET_PDEATHSIG and an end of file), its ptxas dies with it, and its temporary folder is
removed by whoever starts next: the folder's owner holds a lock on it that the kernel drops when the owner dies.

Frames both ways: 4 bytes length, JSON. After a reply with "entry": n, n bytes of the entry itself.
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

IDLE_SECONDS = 30
IDLE_EXIT = 75
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
_YOUNG_SECONDS = 60  # a folder younger than this may be one whose owner has not locked it yet


def write_frame(stream: IO[bytes], message: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(text)) + text + body)
    stream.flush()


def read_exactly(stream: IO[bytes], count: int) -> bytes:
    """`count` bytes of an unbuffered stream (select() must see what has not been read)."""
    data = b""
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def read_frame(stream: IO[bytes]) -> dict[str, Any]:
    return json.loads(read_exactly(stream, _LENGTH.unpack(read_exactly(stream, _LENGTH.size))[0]))


def _die_with_parent() -> None:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass  # not Linux: the end of file on stdin remains


def _children_die_with_us() -> None:
    """Every process we start (ptxas) is killed with us. Safe here: a worker has one thread."""
    popen = subprocess.Popen

    class Popen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("preexec_fn", _die_with_parent)
            super().__init__(*args, **kwargs)

    subprocess.Popen = Popen  # type: ignore[misc]


def _private_folder() -> tuple[Path, int]:
    """A temporary folder of our own, marked as ours by a lock; removes those whose owners died."""
    parent = Path(tempfile.gettempdir())
    prefix = f"powertrain-{os.getuid()}-"
    for left in parent.glob(f"{prefix}*"):
        try:
            facts = left.lstat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _YOUNG_SECONDS:
                continue
            descriptor = os.open(left / "owner", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            pass  # its owner lives, or locks do not work here
        finally:
            os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(folder / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    return folder, descriptor


@contextmanager
def key_lock(path: Path, deadline: float) -> Any:
    """Hold the OS lock of a key; yields whether we have it. Waits until the deadline, then goes on without.

    The kernel drops an flock when its owner dies. The file means nothing; whoever holds the lock removes it.
    """
    descriptor = -1
    held = False
    try:
        while not held:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino
            except BlockingIOError:
                pass
            except OSError:
                break  # read-only, full, or a file system without flock: no lock
            if not held:
                os.close(descriptor)
                descriptor = -1
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        yield held
    finally:
        if held:
            path.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)


def _compile(request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    from powertrain.runtime.compile import kernel_store as stores
    from powertrain.runtime.compile import triton_compat

    key = request["key"]
    store = stores.Store(Path(request["store"]), trouble=None) if request["store"] else None
    deadline = time.monotonic() + request["lock_timeout"]
    with key_lock(store.lock_path(key) if store else folder / "lock", deadline) as held:
        if store and not request["again"] and (entry := store.get(key)):
            return {"source": "another process"}, entry.to_bytes()
        started = time.monotonic()
        source = folder / f"{key[:16]}.ttir"
        source.write_text(request["ttir"])
        facts, cubin, ptx = triton_compat.compile_ir(source, request["options"], request["arch"], request["gluon"])
        image = folder / f"{key[:16]}.cubin"
        image.write_bytes(cubin)
        facts.update(triton_compat.resource_usage(image))
        seconds = round(time.monotonic() - started, 3)
        manifest = {**request["about"], "launch": facts, "seconds": seconds}
        entry = stores.Entry(key, manifest, {"cubin": cubin, "ptx": zlib.compress(ptx.encode())})
        if store and request["again"]:
            store.path(key).unlink(missing_ok=True)
        stored = store.put(entry) if store else False
        trouble = store.trouble if store else None
        return {"source": "compiled", "locked": held, "stored": stored, "trouble": trouble}, entry.to_bytes()


def main() -> None:
    """The worker itself: `sys.argv[1]` is the parent's process id."""
    _die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        os._exit(IDLE_EXIT)  # the parent died before it could take us along
    _children_die_with_us()
    # the pipe is ours alone; what compilers print goes to stderr, which the parent keeps for its error messages
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    folder, owner = _private_folder()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        while select.select([requests], [], [], IDLE_SECONDS)[0]:
            request = read_frame(requests)
            try:
                reply, body = _compile(request, folder)
            except Exception as error:
                reply, body = {"error": str(error) or repr(error), "details": traceback.format_exc()}, b""
            write_frame(replies, {**reply, "entry": len(body)}, body)
        sys.exit(IDLE_EXIT)
    except EOFError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)
