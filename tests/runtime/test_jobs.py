"""How many jobs fit, in machines and containers made of files."""

from pathlib import Path

import pytest

from powertrain.runtime.jobs import available_memory, jobs, usable_cores

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """8 cores, 16 GiB available, no cgroup."""
    _write(tmp_path, "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {16 * 2**20} kB\n")
    _write(tmp_path, "proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-6,9\n")
    return tmp_path


def _write(root: Path, path: str, text: str | int) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_a_bare_machine(machine: Path) -> None:
    assert available_memory(machine) == (16 * GIB, "MemAvailable")
    assert usable_cores(machine) == (8, "cores (affinity)")
    found = jobs(GIB, root=machine)
    assert found.count == 8
    assert (
        found.why
        == "8 at once: 8 cores (affinity), and 0.7 of the 16.0 GiB available (MemAvailable) holds 11 of 1.0 GiB"
    )


def test_memory_bounds(machine: Path) -> None:
    assert jobs(4 * GIB, root=machine).count == 2
    assert jobs(4 * GIB, wanted=64, root=machine).count == 2
    assert jobs(100 * GIB, root=machine).count == 1


def test_wanted_replaces_cores(machine: Path) -> None:
    assert jobs(GIB // 2, wanted=3, root=machine).count == 3
    found = jobs(GIB // 2, wanted=20, root=machine)
    assert found.count == 20 and "20 asked for" in found.why


def test_cgroup_2_tightest_ancestor(machine: Path) -> None:
    _write(machine, "proc/self/cgroup", "0::/pod/job/step")
    top = "sys/fs/cgroup"
    _write(machine, f"{top}/pod/job/step/memory.max", "max")
    _write(machine, f"{top}/pod/job/step/memory.current", 0)
    _write(machine, f"{top}/pod/job/memory.max", 6 * GIB)
    _write(machine, f"{top}/pod/job/memory.current", 3 * GIB)
    _write(machine, f"{top}/pod/job/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    _write(machine, f"{top}/pod/memory.max", 8 * GIB)
    _write(machine, f"{top}/pod/memory.current", 3 * GIB)
    _write(machine, f"{top}/pod/job/step/cpu.max", "max 100000")
    _write(machine, f"{top}/pod/cpu.max", "350000 100000")
    memory, why = available_memory(machine)
    assert memory == 4 * GIB and "memory.max" in why and why.endswith("/pod/job")
    cores, why = usable_cores(machine)
    assert cores == 3 and "CPU quota" in why and why.endswith("/pod)")
    assert jobs(GIB, root=machine).count == 2


def test_cgroup_2_inside_a_container(machine: Path) -> None:
    # the path is outside what is mounted here: the mount's root is the group
    _write(machine, "proc/self/cgroup", "0::/../../elsewhere")
    _write(machine, "sys/fs/cgroup/memory.max", 2 * GIB)
    _write(machine, "sys/fs/cgroup/memory.current", GIB)
    _write(machine, "sys/fs/cgroup/cpu.max", "50000 100000")
    assert available_memory(machine)[0] == GIB
    assert usable_cores(machine)[0] == 1


def test_memory_high_counts(machine: Path) -> None:
    _write(machine, "proc/self/cgroup", "0::/a")
    for name, value in {"max": "max", "high": 3 * GIB, "current": GIB}.items():
        _write(machine, f"sys/fs/cgroup/a/memory.{name}", value)
    assert available_memory(machine)[0] == 2 * GIB


def test_cgroup_1(machine: Path) -> None:
    _write(machine, "proc/self/cgroup", "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/x")
    memory = "sys/fs/cgroup/memory"
    _write(machine, f"{memory}/memory.limit_in_bytes", 9223372036854771712)  # "no limit"
    _write(machine, f"{memory}/memory.usage_in_bytes", 4 * GIB)
    _write(machine, f"{memory}/docker/memory.limit_in_bytes", 5 * GIB)
    _write(machine, f"{memory}/docker/memory.usage_in_bytes", 2 * GIB)
    _write(machine, f"{memory}/docker/memory.stat", f"total_inactive_file {GIB // 2}\n")
    _write(machine, "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", 250000)
    _write(machine, "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", 100000)
    _write(machine, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    _write(machine, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    assert available_memory(machine)[0] == 3.5 * GIB
    assert usable_cores(machine)[0] == 2


def test_a_full_group_still_gets_one(machine: Path) -> None:
    _write(machine, "proc/self/cgroup", "0::/a")
    _write(machine, "sys/fs/cgroup/a/memory.max", GIB)
    _write(machine, "sys/fs/cgroup/a/memory.current", 2 * GIB)
    found = jobs(GIB, root=machine)
    assert found.count == 1 and "holds 0" in found.why


def test_without_proc(tmp_path: Path) -> None:
    assert available_memory(tmp_path)[0] > 0 and usable_cores(tmp_path)[0] >= 1


def test_here() -> None:
    assert jobs(200 << 20).count >= 1
