"""Every check on machines that are not there."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from powertrain.doctor import code, echo, gpus, kernel_store, limits, links, overlap, versions
from powertrain.doctor.checks import CHECKS
from powertrain.doctor.finding import Check, Finding, examine, worst
from powertrain.runtime.machine import Machine, Ran, run_program
from tests.doctor.machines import A100, H100, QUERY, RTX_2080, RTX_3090, install, install_torch, machine, told
from tests.doctor.test_fatbin import elf, entry

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{link}\tPIX\t0-23\t0
GPU1\t{link}\t X \tSYS\t0-23\t0
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
"""


def test_a_machine_without_a_gpu_is_fine(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    left_out = {"echo", "shared-memory", "ulimits", "container", "disk", "kernel-store"}  # of the real machine
    findings = list(examine([check for check in CHECKS if check.name not in left_out], bare))
    assert worst(finding for _, finding in findings) == "ok"
    assert "no NVIDIA driver here" in told(gpus.gpus(bare))


def test_a_check_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    def broken(machine: Machine) -> list[Finding]:
        raise KeyError("torch")

    checks = [Check("broken", "?", broken), Check("fine", "?", lambda machine: [Finding("ok", "fine")])]
    (_, first), (_, second) = examine(checks, machine(tmp_path))
    assert first.level == "problem" and "KeyError: 'torch'" in first.message and second.message == "fine"


def test_a_problem_needs_a_fix() -> None:
    with pytest.raises(ValueError, match="must come with its fix"):
        Finding("problem", "it is broken")
    with pytest.raises(ValueError, match="level must be one of"):
        Finding("error", "it is broken", fix="mend it")  # type: ignore[arg-type]


# GPUs


def test_gpus_are_listed(tmp_path: Path) -> None:
    said = told(gpus.gpus(machine(tmp_path, A100)))
    assert "GPU 0: NVIDIA A100-SXM4-80GB, sm_80, 80 GiB, driver 550.54.14" in said


@pytest.mark.parametrize(
    "ran, words",
    [
        (Ran(124, ""), "does not answer"),
        (Ran(18, "Failed to initialize NVML: Driver/library version mismatch"), "nvidia-smi fails"),
        (Ran(0, ""), "a driver, but no GPU"),
    ],
)
def test_a_sick_driver(tmp_path: Path, ran: Ran, words: str) -> None:
    (finding,) = gpus.gpus(machine(tmp_path, answers={"nvidia-smi -L": ran}))
    assert finding.level == "problem" and words in finding.message


@pytest.mark.parametrize(
    "value, level, words",
    [("0,1", "ok", None), ("", "warning", "hidden"), ("-1", "warning", "hidden"), ("0,4", "problem", "GPU 4 does not")],
)
def test_visible_devices(tmp_path: Path, value: str, level: str, words: str | None) -> None:
    findings = list(gpus.gpus(machine(tmp_path, A100, A100, variables={"CUDA_VISIBLE_DEVICES": value})))
    assert worst(findings) == level and (words or "GPU 0") in told(findings)


def test_cuda_torch_without_a_driver(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    install_torch(bare, "2.11.0", "13.0")
    assert "warning" in told(gpus.gpus(bare)) and "--gpus all" in told(gpus.gpus(bare))


@pytest.mark.parametrize("cuda, level", [("12.8", "ok"), ("13.0", "problem"), ("11.8", "ok")])
def test_driver_against_torch(tmp_path: Path, cuda: str, level: str) -> None:
    here = machine(tmp_path, A100)
    install_torch(here, "2.11.0", cuda)
    (finding,) = gpus.driver(here)
    assert finding.level == level
    if level == "problem":
        assert "580" in (finding.fix or "") and "CUDA 12" in (finding.fix or "")


def test_mixed_archs(tmp_path: Path) -> None:
    (finding,) = gpus.mixed(machine(tmp_path, RTX_2080, RTX_3090))
    assert finding.level == "warning" and 'TORCH_CUDA_ARCH_LIST="7.5 8.6"' in (finding.fix or "")
    assert "all NVIDIA A100" in told(gpus.mixed(machine(tmp_path, A100, A100)))
    other = A100.replace("81920", "40960")
    assert "different memory" in told(gpus.mixed(machine(tmp_path, A100, other)))


@pytest.mark.parametrize(
    "reasons, level, words",
    [
        ("0x0000000000000001", "ok", "nothing but load"),
        ("0x0000000000000004", "warning", "power limit"),
        ("0x0000000000000040", "problem", "heat"),
        ("0x0000000000000080", "problem", "power brake"),
    ],
)
def test_clocks(tmp_path: Path, reasons: str, level: str, words: str) -> None:
    answers = {"clocks_event_reasons": Ran(2, "Field is not valid"), "clocks_throttle_reasons": Ran(0, "")}
    answers["clocks_throttle_reasons"] = Ran(0, f"0, {reasons}, 84, 900, 1980\n")
    (finding,) = gpus.clocks(machine(tmp_path, H100, answers=answers))
    assert finding.level == level and words in finding.message


# GPU code of libraries


def _library(here: Machine, name: str, *units: list[bytes]) -> None:
    path = here.packages[0] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(elf(*units))


def test_code_for_these_gpus(tmp_path: Path) -> None:
    here = machine(tmp_path, RTX_2080, RTX_3090)
    _library(here, "xformers/_C.so", [entry(2, 80, 0x11), entry(2, 90, 0x11)])
    (finding,) = code.code(here)
    assert finding.level == "problem"
    assert "xformers: sm_80, sm_90; no PTX; your NVIDIA GeForce RTX 2080 (sm_75): no code, will fail" in finding.message
    assert "RTX 3090 (sm_86): runs the code of sm_80" in finding.message and '"7.5 8.6"' in (finding.fix or "")


def test_ptx_alone_is_a_warning(tmp_path: Path) -> None:
    here = machine(tmp_path, H100)
    _library(here, "flash_attn_2_cuda.so", [entry(1, 75, 0x8011)])
    (finding,) = code.code(here)
    assert finding.level == "warning" and "PTX 7.5 only: the driver will compile it" in finding.message


def test_source_files_without_code_are_counted(tmp_path: Path) -> None:
    here = machine(tmp_path, RTX_2080)
    _library(here, "torch/lib/libtorch_cuda.so", [entry(2, 75, 0x11)], [entry(2, 80, 0x11)], [entry(2, 80, 0x11)])
    (finding,) = code.code(here)
    assert finding.level == "ok" and "2 of 3 compiled source files have no code for it" in told([finding])


def test_a_library_cut_short(tmp_path: Path) -> None:
    here = machine(tmp_path, H100)
    _library(here, "xformers/_C.so", [entry(2, 90, 0x11)])
    file = here.packages[0] / "xformers/_C.so"
    file.write_bytes(file.read_bytes()[:100])
    assert "cut short at 100 bytes" in told(code.code(here))


def test_no_library(tmp_path: Path) -> None:
    assert "none of torch" in told(code.code(machine(tmp_path, H100)))


# versions


def test_a_pin_that_is_not_met(tmp_path: Path) -> None:
    here = machine(tmp_path)
    install_torch(here, "2.9.0", "12.8", "triton==3.5.0", "nvidia-cudnn-cu12==9.10.2.21; platform_system == 'Plan9'")
    install(here, "triton", "3.6.0")
    install(here, "nvidia_cudnn_cu12", "9.5.1.17")
    said = told(versions.versions(here))
    assert "torch 2.9.0 needs triton==3.5.0, here is 3.6.0" in said and "pip install 'triton==3.5.0'" in said
    assert "nvidia-cudnn-cu12 9.5.1.17" in said and "needs nvidia-cudnn" not in said


def _fixes(machine: Machine) -> list[str | None]:
    return [finding.fix for finding in versions.versions(machine) if finding.level != "ok"]


def test_pins_of_one_package_have_one_remedy(tmp_path: Path) -> None:
    here = machine(tmp_path / "both")
    install_torch(here, "2.7.0", "12.8")
    install(here, "xformers", "0.0.32", "torch>=2.8")
    install(here, "torchvision", "0.23.0", "torch<2.9,!=2.8.0")
    assert _fixes(here) == ["pip install 'torch!=2.8.0,<2.9,>=2.8'"]  # torch 2.9 would be refused by torchvision

    here = machine(tmp_path / "none")
    install_torch(here, "2.7.0", "12.8", "triton==3.3.0")
    install(here, "triton", "3.2.0")
    install(here, "xformers", "0.0.32", "torch==2.8.0")
    install(here, "vllm", "0.11.0", "torch==2.9.0")
    *of_torch, of_triton = sorted(map(str, _fixes(here)), key=lambda fix: fix.startswith("change"))
    assert len(set(of_torch)) == 1 and len(of_torch) == 2
    assert "(xformers: ==2.8.0, vllm: ==2.9.0)" in of_torch[0]
    assert of_torch[0].endswith("pip install --upgrade xformers vllm torch")
    assert of_triton.startswith("change torch first") and of_triton.endswith("brings its own triton")


@pytest.mark.parametrize(
    "specifiers, possible",
    [
        ("<3", True), ("==2.8.0,==2.9.0", False), (">=2.4,!=2.4.*,<3", True), (">2.4,<2.5", True),
        (">=2.5,<2.5", False), ("~=2.4,<2.4.1", True), ("==2.*,>=3", False),
        ("==2.9.0+cu128,>=2.9.0", True), (">=2.9.0rc1,<2.9.0", False),
    ],
)  # fmt: skip
def test_whether_a_version_is_in_all_specifiers(specifiers: str, possible: bool) -> None:
    assert versions._possible(SpecifierSet(specifiers)) is possible


@pytest.mark.parametrize("row", versions.KNOWN_BAD, ids=lambda row: f"{row[0]}-{row[2]}")
def test_known_bad_combinations(tmp_path: Path, row: tuple[str, ...]) -> None:
    name, range_, other, other_range, message, *_ = row
    here = machine(tmp_path)
    bad = {"<2.1.1": "2.0.0", "==2.6.3": "2.6.3", ">=2": "2.1.0", "==9.10.0.*": "9.10.0.56"}
    install(here, name, bad[range_])
    install(here, other, {">=1.0": "2.3.0", ">=2.5": "2.8.0", "<2.3": "2.2.0"}[other_range])
    assert message in told(versions.versions(here))


def test_combinations_that_go_together(tmp_path: Path) -> None:
    here = machine(tmp_path)
    install(here, "flash_attn", "2.8.3")
    install_torch(here, "2.9.0", "12.8")
    install(here, "numpy", "2.1.0")
    assert worst(versions.versions(here)) == "ok"


def test_packages_of_another_cuda(tmp_path: Path) -> None:
    here = machine(tmp_path)
    install_torch(here, "2.9.0", "12.8")
    install(here, "nvidia-cublas-cu12", "12.8")
    assert worst(versions.versions(here)) == "ok"
    again = replace(here)  # the installed packages are read once a machine
    install(again, "transformer_engine_cu13", "2.6.0")
    assert "packages for another CUDA than torch's 12.8: transformer-engine-cu13" in told(versions.versions(again))


@pytest.mark.parametrize(
    "cuda, others, fix",
    [
        # the toolkit's packages have no suffix from CUDA 13 on (nvidia-cublas-cu13 is empty), cuDNN's keep it
        ("13.0", {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-cu12": "9.10.2.21"},
         "pip uninstall nvidia-cublas-cu12 nvidia-cudnn-cu12, then "
         "pip install --force-reinstall --no-deps nvidia-cublas==13.0.0.19 nvidia-cudnn-cu13"),
        ("12.8", {"nvidia-cuda-runtime": "13.0.48", "nvidia-nvtx": "0.0.1.dev5"},
         "pip uninstall nvidia-cuda-runtime, then pip install --force-reinstall --no-deps nvidia-cuda-runtime-cu12"),
        ("13.0", {"transformer-engine-cu12": "2.6.0"},
         "pip uninstall transformer-engine-cu12, then "
         "pip install --force-reinstall --no-deps transformer-engine-cu13==2.6.0"),
        ("13.0", {"nvidia-cublas": "13.0.0.19", "nvidia-nccl-cu13": "2.27.7"}, None),
        ("14.0", {"nvidia-cublas": "14.0.0.1"}, None),
    ],
)  # fmt: skip
def test_the_packages_for_torchs_cuda(tmp_path: Path, cuda: str, others: dict[str, str], fix: str | None) -> None:
    here = machine(tmp_path)
    install_torch(here, "2.9.0", cuda, *["nvidia-cublas==13.0.0.19"][: cuda == "13.0"])
    for name, version in others.items():
        install(here, name, version)
    assert _fixes(here) == ([fix] if fix else [])


def test_two_cudnns(tmp_path: Path) -> None:
    here = machine(tmp_path)
    install(here, "nvidia-cudnn-cu12", "9.10", files=["nvidia/cudnn/lib/libcudnn.so.9"])
    toolkit, system = tmp_path / "usr/local/cuda-12.4/lib64", tmp_path / "usr/lib/x86_64-linux-gnu"
    for folder, name in ((toolkit, "libcudnn.so.9.1.0"), (system, "libcudnn.so.9.2.0")):
        assert "no process can load two versions" in told(versions.twice(here))
        folder.mkdir(parents=True)
        (folder / name).write_text(name)
    (finding,) = versions.twice(here)
    assert finding.level == "warning" and "cuDNN is here in several versions" in finding.message
    assert len(finding.evidence) == 2 and "9.2.0" in finding.evidence[1]
    (finding,) = versions.twice(replace(here, variables={"LD_LIBRARY_PATH": "/usr/local/cuda-12.4/lib64:"}))
    assert finding.level == "problem" and finding.fix == "unset LD_LIBRARY_PATH" and "9.1.0" in finding.message


def test_the_same_library_twice_is_fine(tmp_path: Path) -> None:
    here = machine(tmp_path, variables={"LD_LIBRARY_PATH": "/opt/cuda"})
    install(here, "nvidia-nccl-cu12", "2.27", files=["nvidia/nccl/lib/libnccl.so.2"])
    (tmp_path / "opt/cuda").mkdir(parents=True)
    (tmp_path / "opt/cuda/libnccl.so.2").touch()
    assert worst(versions.twice(here)) == "ok"


# limits


@pytest.mark.parametrize(
    "mib, free, level", [(64, 60, "problem"), (512, 500, "warning"), (8192, 100, "warning"), (8192, 8000, "ok")]
)
def test_shared_memory(tmp_path: Path, mib: int, free: int, level: str) -> None:
    (finding,) = limits.shared_memory(machine(tmp_path), mib * 2**20, free * 2**20)
    assert finding.level == level


def test_shared_memory_is_looked_up(tmp_path: Path) -> None:
    assert "there is no /dev/shm" in told(limits.shared_memory(machine(tmp_path)))
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert "/dev/shm: " in told(limits.shared_memory(machine(tmp_path)))


def test_ulimits(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert worst(limits.ulimits(here, {"nofile": 65536, "nproc": -1, "memlock": 65536})) == "ok"
    assert "ulimit -n is 1024" in told(limits.ulimits(here, {"nofile": 1024, "nproc": -1, "memlock": -1}))
    assert "ulimit -u 65536" in told(limits.ulimits(here, {"nofile": 65536, "nproc": 100, "memlock": -1}))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "memlock=-1" in told(limits.ulimits(here, {"nofile": 65536, "nproc": -1, "memlock": 65536}))


@pytest.mark.parametrize("gib, level", [(3, "warning"), (64, "ok")])
def test_container(tmp_path: Path, gib: int, level: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {gib * 2**20} kB\n")
    (finding,) = limits.container(machine(tmp_path))
    assert finding.level == level


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(tmp_path, variables={"TMPDIR": str(tmp_path / "gone")})
    assert "TMPDIR is" in told(limits.disk(here)) and "mkdir -p" in told(limits.disk(here))
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: _Usage(2**30))
    (tmp_path / "gone").mkdir()
    assert "has 1.0 GiB left" in told(limits.disk(here))


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


# our store


def test_kernel_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.runtime.compile.kernel_store import Entry, Store

    root = tmp_path / "kernels"
    monkeypatch.setattr(kernel_store, "default_root", lambda: root)
    here = machine(tmp_path)
    assert "no kernel was compiled yet" in told(kernel_store.kernel_store(here))
    store = Store(root).open()
    store.put(Entry("a" * 64, {}, {"cubin": b"code"}))
    assert "1 kernels" in told(kernel_store.kernel_store(here)) and "all whole" in told(kernel_store.kernel_store(here))
    store.path("a" * 64).write_bytes(b"")
    (finding,) = kernel_store.kernel_store(here)
    assert finding.level == "warning" and finding.apply and "cut short" in finding.evidence[0]
    assert "renamed into" in finding.apply() and len(list((root / "quarantine").iterdir())) == 1
    root.chmod(0o777)
    assert "refused" in told(kernel_store.kernel_store(here))


def test_kernel_store_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kernels"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(kernel_store, "default_root", lambda: root)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert "lies on nfs4" in told(kernel_store.kernel_store(machine(tmp_path)))


# links


@pytest.mark.parametrize(
    "link, level, words",
    [("NV18", "ok", "every pair"), ("SYS", "warning", "GPU 0 and 1: SYS"), ("PIX", "ok", "PCIe tree")],
)
def test_links(tmp_path: Path, link: str, level: str, words: str) -> None:
    answers = {"topo -m": Ran(0, TOPOLOGY.format(link=link)), "topo -p2p": Ran(0, TOPOLOGY.format(link="OK"))}
    first, peers = links.links(machine(tmp_path, H100, H100, answers=answers))
    assert first.level == level and words in first.message and peers.level == "ok"


def test_the_matrix_has_each_pair_of_gpus_once() -> None:
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tOK\tCNS\nGPU1\tOK\tX\tOK\nGPU2\tCNS\tOK\tX\n\nLegend:\n  OK  = Status Ok\n"
    assert links.matrix(text) == {(0, 1): "OK", (0, 2): "CNS", (1, 2): "OK"}
    assert links.matrix(TOPOLOGY.format(link="NV18")) == {(0, 1): "NV18"} and links.matrix("") == {}


def test_no_peer_access(tmp_path: Path) -> None:
    answers = {"topo -m": Ran(0, TOPOLOGY.format(link="PHB")), "topo -p2p": Ran(0, TOPOLOGY.format(link="CNS"))}
    said = told(links.links(machine(tmp_path, RTX_3090, RTX_3090, answers=answers)))
    assert "no peer access (GPU 0 and 1: CNS)" in said


def test_multicast(tmp_path: Path) -> None:
    answers = {"topo -m": Ran(0, TOPOLOGY.format(link="NV18")), "fabric.state": Ran(0, "Completed\nCompleted\n")}
    assert worst(links.symmetric(machine(tmp_path, H100, H100, answers=answers))) == "ok"
    answers["fabric.state"] = Ran(0, "In Progress\n")
    assert "fabric manager is not ready" in told(links.symmetric(machine(tmp_path, H100, H100, answers=answers)))
    assert "GPU 0 is sm_80" in told(links.symmetric(machine(tmp_path, A100, A100, answers=answers)))
    assert not list(links.symmetric(machine(tmp_path, H100)))


# two ranks


@pytest.mark.slow  # two imports of torch
def test_two_processes_reach_each_other() -> None:
    finding = next(iter(echo.echo(Machine.here())))
    assert finding.level == "ok" and "over gloo" in finding.message


def test_a_rank_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho RuntimeError: no route >&2\nexec sleep 600\n")
    python.chmod(0o755)
    here = machine(tmp_path, python=str(python), variables={"PATH": os.environ["PATH"]})
    install_torch(here, "2.11.0", None)
    monkeypatch.setattr(echo, "SECONDS", 0.5)
    (finding,) = echo.echo(here)
    assert finding.level == "problem" and "do not reach each other over gloo within" in finding.message
    assert "RuntimeError: no route" in finding.evidence


# overlap


def _overlap(here: Machine) -> str:
    return told(finding for _, finding in examine(overlap.CHECKS, here))


def test_overlap_of_a_good_machine(tmp_path: Path) -> None:
    answers = {
        "topo -m": Ran(0, TOPOLOGY.format(link="NV18")),
        "topo -p2p": Ran(0, TOPOLOGY.format(link="OK")),
        "nvlink -s": Ran(0, "GPU 0: NVIDIA H100\n" + "".join(f"\t Link {n}: 26.562 GB/s\n" for n in range(18))),
        "python -c": Ran(0, "GBPS 350.2\n"),
    }
    here = machine(tmp_path, H100, H100, answers=answers, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    install_torch(here, "2.9.0", "12.8")
    install(here, "transformer_engine", "2.6.0")
    said = _overlap(here)
    assert "350 GB/s measured; 18 NVLinks of GPU 0 carry 478 GB/s" in said and "problem" not in said
    assert "starts over torch.distributed" in said and "torchrun --nproc-per-node=2" in said


def test_overlap_with_an_old_transformer_engine(tmp_path: Path) -> None:
    here = machine(tmp_path, A100, A100, answers={"topo -m": Ran(0, TOPOLOGY.format(link="NV12"))})
    install(here, "transformer_engine", "1.6.0")
    said = _overlap(here)
    for words in ("starts over MPI", "MPI_HOME must be", "no mpiexec", "mpi4py is missing", "GDRCopy's driver",
                  "UB_SKIPMC=1", "CUDA_DEVICE_MAX_CONNECTIONS must be 1", "mpiexec -np 2 -x MASTER_ADDR",
                  "order: MPI"):  # fmt: skip
        assert words in said, words


def test_overlap_without_gpus(tmp_path: Path) -> None:
    assert "needs two" in _overlap(machine(tmp_path)) and "TransformerEngine is not installed" in _overlap(
        machine(tmp_path)
    )


def test_a_copy_that_hangs(tmp_path: Path) -> None:
    here = machine(tmp_path, H100, H100, answers={"python -c": Ran(124, "")})
    install_torch(here, "2.9.0", "12.8")
    assert "a copy from GPU 0 to GPU 1 hangs" in _overlap(here)


# the machine itself


def test_programs_are_read_without_the_width_and_colours_of_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of attention looks for a sentence in a table that was one column wide."""
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_program(["sh", "-c", "echo $COLUMNS$FORCE_COLOR."], 10.0) == Ran(0, ".\n")


def test_programs_end_at_their_deadline() -> None:
    assert run_program(["no-such-program-anywhere"], 1.0) is None
    assert run_program(["sh", "-c", "echo hello; exit 3"], 10.0) == Ran(3, "hello\n")
    ran = run_program(["sh", "-c", "echo begun; sleep 600"], 0.3)
    assert ran == Ran(124, "begun\n")


def test_this_machine() -> None:
    here = Machine.here()
    assert here.version("torch") and re.match(r"\d", here.version("torch") or "")
    assert here.file_system(Path("/proc"))[0] == "proc"


def test_old_drivers_name_no_arch(tmp_path: Path) -> None:
    here = machine(tmp_path, answers={QUERY: Ran(0, "0, Tesla V100, [N/A], 418.87, 16160\nnonsense\n")})
    assert [(gpu.name, gpu.arch) for gpu in here.gpus] == [("Tesla V100", None)]


def test_a_lost_gpu_is_a_problem_and_not_a_smaller_one(tmp_path: Path) -> None:
    lost = "[Unknown Error], [N/A], [N/A], [Unknown Error]"
    made = machine(tmp_path, lost, A100, A100)
    install_torch(made, "2.11.0", "12.8")
    found = told(gpus.gpus(made))
    assert "problem: GPU 0 does not answer: [Unknown Error]" in found and "ok: GPU 1: NVIDIA A100" in found
    assert told(gpus.mixed(made)).startswith("ok: 2 GPUs, all NVIDIA A100")
    assert told(gpus.driver(made)).startswith("ok: driver 550.54.14")
    assert "GPU 1 is sm_80, it needs sm_90" in told(links.symmetric(made))


def test_a_gpu_that_has_the_hosts_memory(tmp_path: Path) -> None:
    found = told(gpus.gpus(machine(tmp_path, "NVIDIA GB10, 12.1, 580.95.05, [N/A]")))
    assert "sm_121, no memory of its own reported, driver 580.95.05" in found


def test_an_nvidia_smi_that_reports_no_compute_capability(tmp_path: Path) -> None:
    refused = Ran(2, 'Field "compute_cap" is not a valid field to query.')
    older = Ran(0, "0, Tesla V100-SXM2-32GB, P0, 470.82.01, 32510")
    answers = {QUERY: refused, QUERY.replace("compute_cap", "pstate"): older, "nvidia-smi -L": Ran(0, "GPU 0: Tesla")}
    found = told(gpus.gpus(machine(tmp_path, answers=answers)))
    assert found.startswith("ok: GPU 0: Tesla V100-SXM2-32GB, arch unknown, 32 GiB, driver 470.82.01")
