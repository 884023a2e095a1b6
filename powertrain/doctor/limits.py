"""Limits of the container and the system: shared memory, ulimits, memory, cores, space on disk."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime import jobs
from powertrain.runtime.machine import Machine

GIB = 2**30
# of /dev/shm. Docker gives 64 MiB; NCCL alone takes about 10 MB for each pair of GPUs
SHARED_MEMORY = 1 * GIB
OPEN_FILES, PROCESSES, DISK = 4096, 4096, 10 * GIB


def shared_memory(machine: Machine, size: int | None = None, free: int | None = None) -> Iterator[Finding]:
    """size, free: bytes of /dev/shm; looked up by default."""
    if size is None or free is None:
        try:
            facts = os.statvfs(machine.path("/dev/shm"))
        except OSError:
            yield Finding("problem", "there is no /dev/shm", fix="mount -t tmpfs tmpfs /dev/shm")
            return
        size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    evidence = (f"/dev/shm: {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB free",)
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if size < SHARED_MEMORY:
        message = "/dev/shm is small: workers of a DataLoader die of a bus error, NCCL of 'No space left on device'"
        yield Finding("problem" if size <= 64 * 2**20 else "warning", message, evidence, fix)
    elif free < SHARED_MEMORY:
        message = "/dev/shm is nearly full; killed jobs leave files there"
        yield Finding("warning", message, evidence, "ls -la /dev/shm   # then delete those of jobs that are gone")
    else:
        yield Finding("ok", evidence[0])


def ulimits(machine: Machine, limits: dict[str, int] | None = None) -> Iterator[Finding]:
    """limits: soft limits of open files and processes, and of locked memory; looked up by default. -1: none."""
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    soft = limits if limits is not None else {name: resource.getrlimit(number)[0] for name, number in names.items()}
    evidence = tuple(f"{name}: {'unlimited' if value < 0 else value}" for name, value in soft.items())
    low = False
    for name, least, letter, why in (
        ("nofile", OPEN_FILES, "n", "DataLoader workers and many ranks run out of file descriptors"),
        ("nproc", PROCESSES, "u", "compilers and DataLoader workers cannot be started"),
    ):
        if 0 <= soft[name] < least:
            low = True
            yield Finding("warning", f"ulimit -{letter} is {soft[name]}: {why}", evidence, f"ulimit -{letter} 65536")
    if 0 <= soft["memlock"] < 64 * 2**20 and any(machine.path("/sys/class/infiniband").glob("*")):
        low = True
        message = (
            "locked memory is limited, and InfiniBand registers all it sends: NCCL fails with 'Cannot allocate memory'"
        )
        yield Finding(
            "problem", message, evidence, "docker run --ulimit memlock=-1; else 'memlock unlimited' in limits.conf"
        )
    if not low:
        yield Finding("ok", ", ".join(evidence))


def container(machine: Machine) -> Iterator[Finding]:
    """Memory and cores left by cgroups."""
    memory, memory_why = jobs.available_memory(machine.root)
    cores, cores_why = jobs.usable_cores(machine.root)
    evidence = (f"{memory / GIB:.1f} GiB available: {memory_why}", f"{cores} {cores_why}")
    if memory < 4 * GIB:
        message = f"{memory / GIB:.1f} GiB of memory left: one compiler of flash-attn or TransformerEngine takes 3 to 5"
        fix = "raise the container's memory limit, or build with MAX_JOBS=1"
        yield Finding("warning", message, evidence, fix)
    else:
        yield Finding("ok", f"{memory / GIB:.1f} GiB and {cores} cores to use", evidence)


def disk(machine: Machine) -> Iterator[Finding]:
    """Room where builds and caches go."""
    chosen = {"TMPDIR": machine.variables.get("TMPDIR", "/tmp"), "home": str(machine.home)}
    for name, folder in chosen.items():
        path = Path(folder)
        if not path.is_dir():
            fix = f"mkdir -p {path}" if name == "TMPDIR" else "set HOME to a folder that exists"
            yield Finding("problem", f"{name} is {path}, which is no folder", fix=fix)
            continue
        free = shutil.disk_usage(path).free
        if free < DISK:
            message = f"{name} ({path}) has {free / GIB:.1f} GiB left: a build of flash-attn needs more"
            yield Finding("warning", message, fix="set TMPDIR to a larger disk, or clear pip's cache: pip cache purge")
        else:
            yield Finding("ok", f"{name} ({path}) has {free / GIB:.0f} GiB left")


CHECKS = (
    Check("shared-memory", "is /dev/shm large enough?", shared_memory),
    Check("ulimits", "are the ulimits large enough?", ulimits),
    Check("container", "how much memory and how many cores may be used?", container),
    Check("disk", "is there space for builds?", disk),
)
