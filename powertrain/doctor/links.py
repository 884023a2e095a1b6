"""How GPUs reach each other: NVLink, peer access, and the requirements of symmetric memory and multicast."""

import re
from collections.abc import Iterator

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine


def links(machine: Machine) -> Iterator[Finding]:
    """The matrix of nvidia-smi topo, and pairs without peer access."""
    if len(machine.gpus) < 2:
        yield Finding("ok", f"{len(machine.gpus)} GPU{'' if len(machine.gpus) == 1 else 's'} here: nothing to connect")
        return
    topology = machine.run(["nvidia-smi", "topo", "-m"], 20.0)
    if topology is None or topology.status:
        output = (topology.output.strip()[:200],) if topology else ()
        yield Finding("warning", "the links between GPUs are unknown", output, "nvidia-smi topo -m")
        return
    pairs = matrix(topology.output)
    nvlink = [pair for pair, link in pairs.items() if link.startswith("NV")]
    slow = {pair: link for pair, link in pairs.items() if link in ("SYS", "NODE")}
    evidence = tuple(topology.output.rstrip().splitlines()[: len(machine.gpus) + 1])
    if len(nvlink) == len(pairs):
        yield Finding("ok", "NVLink between every pair of GPUs", evidence)
    elif slow:
        (one, other), link = next(iter(slow.items()))
        message = f"{len(slow)} of {len(pairs)} pairs of GPUs meet over the CPU (GPU {one} and {other}: {link})"
        yield Finding(
            "warning", message, evidence, "keep tensor parallelism within GPUs joined by NVLink or one switch"
        )
    else:
        yield Finding(
            "ok", f"NVLink between {len(nvlink)} of {len(pairs)} pairs, one PCIe tree for the others", evidence
        )
    yield from _peers(machine)


def matrix(topology: str) -> dict[tuple[int, int], str]:
    """{(0, 1): "NV18"} from `nvidia-smi topo -m` or `-p2p r`, each pair of GPUs once; columns of NICs are left out."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+(?!GPU|NIC)\S", line)]
    return {
        (row, column): link
        for row, (_, *links) in enumerate(rows)
        for column, link in enumerate(links[: len(rows)])
        if column > row
    }


def _peers(machine: Machine) -> Iterator[Finding]:
    ran = machine.run(["nvidia-smi", "topo", "-p2p", "r"], 20.0)
    if ran is None or ran.status:
        return
    without = {pair: output for pair, output in matrix(ran.output).items() if output != "OK"}
    if not without:
        yield Finding("ok", "every GPU can read every other's memory (P2P)")
        return
    (one, other), output = next(iter(without.items()))
    message = (
        f"{len(without)} pairs of GPUs have no peer access (GPU {one} and {other}: {output}): NCCL copies via the CPU"
    )
    fix = "normal for GeForce cards without NVLink; else turn off ACS and the IOMMU in the BIOS"
    yield Finding("warning", message, tuple(ran.output.rstrip().splitlines()[: len(machine.gpus) + 1]), fix)


def symmetric(machine: Machine) -> Iterator[Finding]:
    """Requirements of torch's symmetric memory and NVLink multicast on this machine."""
    if len(machine.gpus) < 2:
        return
    lacks = list(multicast_lacks(machine))
    if lacks:
        fix = "nothing to do where that is the hardware; collectives then run over NCCL"
        yield Finding("warning", "no NVLink multicast: " + "; ".join(lacks), fix=fix)
    else:
        yield Finding("ok", "the hardware has NVLink multicast, and symmetric memory can use it")


def multicast_lacks(machine: Machine) -> Iterator[str]:
    """Multicast needs NVSwitch, sm_90 and a 535 driver; the fabric manager must have joined the GPUs.

    Source: CUDA driver API, cuMulticastCreate; research of TransformerEngine's Userbuffers.
    """
    old = [gpu for gpu in machine.gpus if gpu.arch is not None and gpu.arch < 90]
    if old:
        yield f"GPU {old[0].index} is sm_{old[0].arch}, it needs sm_90"
    if machine.driver and int(machine.driver.split(".")[0]) < 535:
        yield f"driver {machine.driver}, it needs 535"
    topology = machine.run(["nvidia-smi", "topo", "-m"], 20.0)
    pairs = matrix(topology.output) if topology and not topology.status else {}
    if not pairs or not all(link.startswith("NV") for link in pairs.values()):
        yield "not every pair of GPUs has NVLink"
    ran = machine.run(["nvidia-smi", "--query-gpu=fabric.state", "--format=csv,noheader"], 20.0)
    states = {line.strip() for line in ran.output.splitlines()} if ran and not ran.status else set()
    if states & {"Not Started", "In Progress"}:
        yield f"the fabric manager is not ready ({', '.join(sorted(states))}; systemctl start nvidia-fabricmanager)"


CHECKS = (
    Check("links", "how are the GPUs connected?", links),
    Check("symmetric-memory", "can symmetric memory and multicast be used?", symmetric),
)
