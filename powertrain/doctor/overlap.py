"""Check whether this machine can overlap tensor parallelism with compute: Powertrain, TransformerEngine's Userbuffers.

Requirements of Userbuffers depend on its version, and its guides do not list them. The facts below are read in
its source: initialize_ub in module/base.py, build_tools/pytorch.py, pull requests 147, 161, 901, 932 and 986; and in
Megatron-LM's, which asks for version 1.9.0 before it starts Userbuffers without MPI.
"""

import re
from collections.abc import Iterator

from packaging.version import Version

from powertrain.doctor.finding import Check, Finding
from powertrain.doctor.links import matrix, multicast_lacks
from powertrain.runtime.machine import Machine

# pull request 901: before it Userbuffers starts over MPI alone
_NO_MPI = Version("1.9.0")
_OPTIONAL = Version("0.8.0")  # pull request 147: Userbuffers came

_COPY = """
import torch
a, b = torch.empty(2**28, dtype=torch.uint8, device="cuda:0"), torch.empty(2**28, dtype=torch.uint8, device="cuda:1")
times = []
for _ in range(6):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(); b.copy_(a, non_blocking=True); end.record(); torch.cuda.synchronize(0); torch.cuda.synchronize(1)
    times.append(start.elapsed_time(end))
print("GBPS", 2**28 / min(times[1:]) / 1e6)
"""


def hardware(machine: Machine) -> Iterator[Finding]:
    """Two GPUs that read each other's memory, and how fast."""
    if len(machine.gpus) < 2:
        message = f"{len(machine.gpus)} GPUs here: tensor parallelism, and with it overlap, needs two"
        yield Finding("warning", message, fix="run this on a machine with two GPUs or more")
        return
    peers = machine.run(["nvidia-smi", "topo", "-p2p", "r"], 20.0)
    pairs = matrix(peers.output) if peers and not peers.status else {}
    without = [pair for pair, output in pairs.items() if output != "OK"]
    if without or not pairs:
        words = f"GPU {without[0][0]} cannot read GPU {without[0][1]}" if without else "peer access is unknown"
        fix = "without it chunked NCCL collectives are the best there is; see the check `links`"
        yield Finding("warning", f"no copy-engine overlap: {words}", fix=fix)
    else:
        yield Finding("ok", "every GPU reads every other's memory: copy engines can move chunks while GEMMs run")
    yield from _rate(machine)


def _rate(machine: Machine) -> Iterator[Finding]:
    status = machine.run(["nvidia-smi", "nvlink", "-s", "-i", "0"], 20.0)
    speeds = re.findall(r"Link \d+:\s*([\d.]+) GB/s", status.output) if status and not status.status else []
    nominal = f"{len(speeds)} NVLinks of GPU 0 carry {sum(map(float, speeds)):.0f} GB/s each way by specification"
    ran = machine.run([machine.python, "-c", _COPY], 90.0) if machine.torch_cuda else None
    measured = re.search(r"GBPS ([\d.]+)", ran.output) if ran else None
    if measured:
        yield Finding(
            "ok", f"GPU 0 to GPU 1: {float(measured[1]):.0f} GB/s measured" + (f"; {nominal}" if speeds else "")
        )
    elif ran is not None:
        output = tuple(ran.output.strip().splitlines()[-2:])
        message = "a copy from GPU 0 to GPU 1 failed" if ran.status != 124 else "a copy from GPU 0 to GPU 1 hangs"
        yield Finding(
            "problem", message, output, "turn off ACS and the IOMMU, or set NCCL_P2P_DISABLE=1 to live without it"
        )
    elif speeds:
        yield Finding("ok", nominal)


def userbuffers(machine: Machine) -> Iterator[Finding]:
    """Requirements of the installed TransformerEngine's Userbuffers, and the missing ones."""
    text = machine.version("transformer-engine") or machine.version("transformer-engine-torch")
    if text is None:
        yield Finding("ok", "TransformerEngine is not installed: nothing to say of its Userbuffers")
        return
    version = Version(text)
    if version < _OPTIONAL:
        fix = "pip install --no-build-isolation 'transformer_engine[pytorch]>=2'"
        yield Finding("problem", f"TransformerEngine {text} has no Userbuffers", fix=fix)
        return
    wants_mpi = version < _NO_MPI or machine.variables.get("NVTE_UB_WITH_MPI") == "1"
    yield Finding(
        "ok", f"TransformerEngine {text}: Userbuffers starts over {'MPI' if wants_mpi else 'torch.distributed'}"
    )
    yield from _mpi(machine, version) if wants_mpi else ()
    yield from _multicast(machine)
    yield from _connections(machine)
    yield from (Finding("ok", line) for line in launch(version, wants_mpi, max(2, len(machine.gpus))))


def _mpi(machine: Machine, version: Version) -> Iterator[Finding]:
    variable = "NVTE_UB_WITH_MPI" if version >= _NO_MPI else "NVTE_WITH_USERBUFFERS"
    home = machine.variables.get("MPI_HOME")
    rebuild = f"{variable}=1 MPI_HOME=/usr/local/mpi pip install --no-build-isolation transformer_engine[pytorch]"
    if not home or not machine.path(home).joinpath("include/mpi.h").is_file():
        message = f"MPI_HOME must be MPI's root (include/mpi.h in it) while it is built, got {home or 'nothing'}"
        yield Finding("problem", message, fix=f"install Open MPI with its headers, then: {rebuild}")
    if machine.run(["mpiexec", "--version"], 10.0) is None:
        yield Finding("problem", "there is no mpiexec, and ranks must be started by it", fix="install Open MPI")
    if machine.version("mpi4py") is None:
        message = "mpi4py is missing: it starts MPI before NCCL, in the order that Userbuffers needs"
        yield Finding("problem", message, fix="pip install mpi4py")
    if version < _NO_MPI and not machine.path("/dev/gdrdrv").exists():
        message = "GDRCopy's driver is not loaded (/dev/gdrdrv); builds of this age that define GDR (-DGDR) need it"
        fix = "install GDRCopy and load gdrdrv; or TransformerEngine 1.9 or newer, which needs neither it nor MPI"
        yield Finding("warning", message, fix=fix)


def _multicast(machine: Machine) -> Iterator[Finding]:
    if len(machine.gpus) < 2:
        return
    lacks = tuple(multicast_lacks(machine))
    if not lacks:
        yield Finding("ok", "NVLink multicast is there")
    elif machine.variables.get("UB_SKIPMC") == "1":
        yield Finding("ok", "no multicast, and UB_SKIPMC=1 says so: CUDA IPC is used", lacks)
    else:
        message = "no NVLink multicast: initialize_ub stops with an error"
        yield Finding("problem", message, lacks, "export UB_SKIPMC=1   # CUDA IPC instead of multicast")


def _connections(machine: Machine) -> Iterator[Finding]:
    value = machine.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1":
        yield Finding("ok", "CUDA_DEVICE_MAX_CONNECTIONS=1")
    else:
        message = f"CUDA_DEVICE_MAX_CONNECTIONS must be 1, or kernels start in another order; got {value or 'nothing'}"
        yield Finding("problem", message, fix="export CUDA_DEVICE_MAX_CONNECTIONS=1")


def launch(version: Version, mpi: bool, ranks: int) -> tuple[str, ...]:
    """The order of calls, and the line."""
    call = "initialize_ub([tokens, hidden], tp_size, ...)"
    if version >= _NO_MPI and not mpi:
        return (
            'order: init_process_group("nccl"), then te.module.base.' + call + ", then the first layer",
            'initialize_ub(..., bootstrap_backend="gloo") needs no MPI; unset it prefers MPI, then gloo, then NCCL',
            "tokens is fixed, a multiple of tp_size; a tensor group's ranks are neighbours; sequence parallelism is on",
            f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node={ranks} train.py",
        )
    return (
        "order: MPI (from mpi4py import MPI), then init_process_group('nccl'), new_group(backend='mpi'), then " + call,
        "out of order it dies: MPI_Comm_rank() called before MPI_INIT",
        "a fork's userbuffer_use_c10d_pg leaves -DMPI and -DGDR out of the build: then start it without MPI",
        f"mpiexec -np {ranks} -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 -x CUDA_DEVICE_MAX_CONNECTIONS=1 "
        "python train.py",
    )


CHECKS = (
    Check("overlap-hardware", "can GPUs copy from each other while they compute?", hardware),
    Check("overlap-userbuffers", "what does TransformerEngine's Userbuffers need here?", userbuffers),
)
