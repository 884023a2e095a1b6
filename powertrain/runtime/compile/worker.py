"""A compile worker: reads TTIR from its parent, writes kernel entries. Imports triton, never torch, never user code.

A worker dies with its parent (PR_SET_PDEATHSIG and end of file), and its ptxas dies with it. Its temporary folder is
made and removed by its parent; by the worker itself if it outlives the parent; else by the next process that starts a
worker: the worker holds a lock on it, which the system releases when the worker dies.

Frames both ways: 4 bytes length, JSON. After a reply with "entry": n, n bytes of the entry itself. A worker that ends
after idling sends {"resting": true}, which may cross a request: the request then goes to another worker.
"""

import ctypes
import fcntl
import importlib
import json
import os
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

IDLE_SECONDS = 30
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
# a folder younger than this may be one that its worker has not taken yet
_YOUNG_SECONDS = 60
_OWNER = "owner"


def frame(message: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text + body


def parse_frame(read: Callable[[int], bytes]) -> dict[str, Any]:
    """`read(count)` gives exactly so many bytes."""
    message = json.loads(read(_LENGTH.unpack(read(_LENGTH.size))[0]))
    if not isinstance(message, dict):
        raise ValueError(f"a frame must be a JSON object, got {type(message).__name__}")
    return message


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes: a signal may cut a single write short."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _die_with_parent(number: int = signal.SIGKILL) -> None:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        # not Linux: the end of file on stdin remains
        pass


def _children_die_with_us() -> None:
    """Every process we start (ptxas) is killed with us. Safe here: a worker has one thread."""
    popen = subprocess.Popen

    class Popen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # the signal is for direct children only: a worker that is killed would leave ptxas running
            kwargs.setdefault("preexec_fn", _die_with_parent)
            super().__init__(*args, **kwargs)

    subprocess.Popen = Popen  # type: ignore[misc]


def make_folder() -> Path:
    """A temporary folder for a worker; those whose worker died are removed."""
    parent, prefix = Path(tempfile.gettempdir()), f"powertrain-{os.getuid()}-"
    for left in parent.glob(f"{prefix}*"):
        _remove_if_dead(left)
    return Path(tempfile.mkdtemp(prefix=prefix))


def _remove_if_dead(folder: Path) -> None:
    try:
        facts = folder.lstat()
    except OSError:  # its worker, or another process like this one, removed it meanwhile
        return
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
        return
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # no worker took it yet, or it died on the way there
        if time.time() - facts.st_mtime > _YOUNG_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # its owner lives, or locks do not work here
        pass
    finally:
        os.close(descriptor)


def own(folder: Path) -> int:
    """Mark a folder as this process's, by a lock that ends with it: the descriptor that holds the lock."""
    unlocked = folder / f"{_OWNER}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    # renamed after the lock: another process must not see the file unlocked
    unlocked.rename(folder / _OWNER)
    return descriptor


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        # who held the lock before has just removed it
        return False


@contextmanager
def key_lock(path: Path, deadline: float) -> Any:
    """Hold the OS lock of a key; yields whether we have it. Waits until the deadline, then goes on without.

    The kernel drops an flock when its owner dies. The file has no content; the process that holds the lock removes it.
    """
    descriptor = -1
    held = False
    try:
        while not held:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the file may have been removed, and made anew, between open and lock
                held = _same_file(path, descriptor)
            except BlockingIOError:
                pass
            except OSError:
                # read-only, full, or a file system without flock: no lock
                break
            if not held:
                os.close(descriptor)
                descriptor = -1
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        yield held
    finally:
        if held:
            # removed while locked, so that no process locks a file that is about to go; one that stays does no harm
            with suppress(OSError):
                path.unlink()
        if descriptor >= 0:
            os.close(descriptor)


def _compile(request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    from powertrain.runtime.compile import kernel_store as stores
    from powertrain.runtime.compile import triton_compat

    key = request["key"]
    store = stores.Store(Path(request["store"]), trouble=None) if request["store"] else None
    deadline = time.monotonic() + request["lock_timeout"]
    with key_lock(store.lock_path(key) if store else folder / "lock", deadline) as held:
        # looked up again under the lock: the process that held it before has most likely compiled this kernel
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
        stored = store.put(entry) if store else False
        trouble = store.trouble if store else None
        return {"source": "compiled", "locked": held, "stored": stored, "trouble": trouble}, entry.to_bytes()


class _ParentGone(BaseException):
    """The parent ended while this worker had nothing to do."""


def _at_rest(number: int, _: object) -> None:
    raise _ParentGone


def main() -> None:
    """The worker itself. `sys.argv`: the parent's process id, this worker's folder, seconds of idleness before rest."""
    parent, folder, rest = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    _die_with_parent()
    if os.getppid() != parent:
        # the parent died before PR_SET_PDEATHSIG was set
        os._exit(1)
    _children_die_with_us()
    # descriptor 1 becomes stderr, kept by the parent for error messages: a compiler's output must not mix with replies
    replies, requests = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    own(folder)
    # ptxas and Triton leave their files in a folder that the parent removes
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    signal.signal(signal.SIGTERM, _at_rest)
    # now, while the parent lowers the kernel; an error is met again by the first request, which reports it
    with suppress(Exception):
        importlib.import_module("powertrain.runtime.compile.triton_compat")
    try:
        while _has_work(requests, parent, rest):
            request = parse_frame(partial(_read, requests))
            try:
                reply, body = _compile(request, folder)
            except Exception as error:
                reply, body = {"error": str(error) or repr(error), "details": traceback.format_exc()}, b""
            _write(replies, frame({**reply, "entry": len(body)}, body))
        # announced, since a request may be on its way: the parent asks another worker then
        _write(replies, frame({"resting": True, "entry": 0}))
        status = 0
    except (EOFError, BrokenPipeError, _ParentGone):
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    # not sys.exit: the libraries' exit handlers take a tenth of a second
    os._exit(status)


def _has_work(requests: int, parent: int, rest: float) -> bool:
    """Wait for a request. A parent that dies meanwhile lets us remove our folder first."""
    _die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise _ParentGone
    ready = select.select([requests], [], [], rest)[0]
    _die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        raise _ParentGone
    return bool(ready)
