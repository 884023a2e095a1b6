"""A small kernel and ways to compile it, for the runtime's tests. As a program: compile it and say what happened."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton.language as tl

import powertrain.runtime.compile.triton_compat
from powertrain.runtime.launch import Kernel, kernel
from powertrain.runtime.recording import record

ROOT = Path(__file__).parents[2]


@kernel()
def _twice_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + cols, x + x, mask=cols < n)


def spec_of(launched: Kernel = _twice_kernel, arch: int = 80, block: int = 128):
    x = torch.empty(100, device="meta")
    with record(f"sm_{arch}") as wanted:
        launched[(1,)](x, x, 100, BLOCK=block)
    return wanted.specs[0]


def environment(store: Path, **extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("POWERTRAIN_", "TRITON_"))}
    return {**clean, "POWERTRAIN_STORE": str(store), "PYTHONPATH": str(ROOT), **extra}


def start(store: Path, *args: str, **extra: str) -> subprocess.Popen:
    """This file as a program, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.kernels", *args],
        cwd=ROOT,
        env=environment(store, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(store: Path, *args: str, **extra: str) -> dict:
    """Run to the end: what it printed, and its stderr under "stderr"."""
    process = start(store, *args, **extra)
    out, err = process.communicate(timeout=120)
    result = json.loads(out.splitlines()[-1]) if out.strip() else {}
    return {**result, "stderr": err, "status": process.returncode}


def fake_ptxas(folder: Path, behaviour: str) -> str:
    """A ptxas that answers --version and otherwise does `behaviour` (shell) if the file `folder/armed` exists."""
    real = powertrain.runtime.compile.triton_compat._bundled("ptxas")
    script = folder / "ptxas"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = "--version" ]; then exec {real} --version; fi\n'
        f'if [ -e {folder}/armed ]; then touch {folder}/reached; {behaviour}; fi\nexec {real} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (folder / "armed").touch()
    return str(script)


def descendants_of(marker: str) -> list[int]:
    """Living processes whose command line or environment holds `marker`, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if marker.encode() in text and not zombie:
            found.append(int(entry.name))
    return found


def wait_until(condition, seconds: float = 60) -> bool:
    """Poll; the limit only ends a broken test, nothing is asserted about how long it took."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def main(what: str) -> None:
    from powertrain.runtime import tracing
    from powertrain.runtime.compile import service as compile_service

    if what == "die":  # a forked child lives on while the process dies in the middle of a compile
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(json.dumps({"child": child}), flush=True)
    try:
        entry, source = compile_service.entry_for(spec_of())
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    events = [event.text for event in tracing.trace() if event.kind == "warning"]
    print(json.dumps({"source": source, "registers": entry.manifest["launch"]["registers"], "warnings": events}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "compile")
