"""Number of parallel jobs, from the memory and the cores that this process may use.

A container shows the whole machine in /proc/meminfo and os.cpu_count(); its limits are those of its cgroup (version 1
or 2) and of every group above it, of which the tightest counts. Cores are those of the affinity mask, cut by the quota.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# of the available memory: estimates err, and other processes share the machine
SHARE = 0.7


@dataclass(frozen=True)
class Jobs:
    count: int
    why: str  # one sentence


def jobs(per_job_bytes: int, wanted: int | None = None, *, root: str | Path = "/") -> Jobs:
    """Number of jobs of `per_job_bytes` each to run at once: at least 1, at most `wanted` or one a core.

    wanted  replaces the number of cores, never the limit by memory
    root    where /proc and /sys are found (for tests)
    """
    memory, memory_why = available_memory(root)
    cores, cores_why = (wanted, "asked for") if wanted is not None else usable_cores(root)
    fit = int(memory * SHARE // per_job_bytes)
    count = max(1, min(cores, fit))
    by_memory = f"{SHARE} of the {_size(memory)} available ({memory_why}) holds {fit} of {_size(per_job_bytes)}"
    return Jobs(count, f"{count} at once: {cores} {cores_why}, and {by_memory}")


def available_memory(root: str | Path = "/") -> tuple[int, str]:
    """Bytes that can still be allocated here, and the source of that limit."""
    root = Path(root)
    # every level of the hierarchy has its own limit, so the tightest counts
    bounds = [(_mem_available(root), "MemAvailable")]
    for group in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.high", "memory.current")):
            bounds += _left(group, limit, used, "inactive_file")
        bounds += _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(bounds)


def usable_cores(root: str | Path = "/") -> tuple[int, str]:
    """Cores that this process may keep busy, and the source of that limit."""
    root = Path(root)
    bounds = [(float(_affinity(root)), "cores (affinity)")]
    for group in _groups(root, "cpu"):
        quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
        if quota == "max":
            quota, period = _read(group / "cpu.cfs_quota_us") or "-1", _read(group / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            bounds.append((int(quota) / int(period), f"cores (CPU quota of cgroup {group})"))
    cores, why = min(bounds)
    return max(1, int(cores)), why


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of all above it, version 2 and the version 1 hierarchy of `controller`.

    Inside a container the path may be the host's and absent here; the mount's own root is then the group.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            tops = [mount, mount / "unified"]
        elif controller in names.split(","):
            tops = [mount / controller, mount / names]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in dict.fromkeys(top.resolve() for top in tops if top.is_dir()):
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _left(group: Path, limit: str, used: str, cache: str) -> list[tuple[int, str]]:
    """Bytes free under a cgroup's memory limit; inactive page cache counts as free, as it does in MemAvailable."""
    allowed, taken = _read(group / limit), _read(group / used)
    if allowed is None or taken is None or not allowed.isdigit():
        return []
    statistics = dict(line.split(maxsplit=1) for line in (_read(group / "memory.stat") or "").splitlines())
    left = int(allowed) - max(0, int(taken) - int(statistics.get(cache, 0)))
    return [(max(0, left), f"{limit} of cgroup {group}")]


def _mem_available(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    import psutil  # not Linux

    return int(psutil.virtual_memory().available)


def _affinity(root: Path) -> int:
    """The cores in Cpus_allowed_list, "0-3,8" for five."""
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            ranges = (part.partition("-") for part in line.split()[1].split(","))
            return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
    return os.cpu_count() or 1


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
