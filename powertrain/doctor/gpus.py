"""The GPUs, their driver, whether they are alike, and whether anything slows them down."""

import re
from collections import Counter
from collections.abc import Iterator

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine

# the oldest Linux driver of a CUDA major version under minor-version compatibility
# source: CUDA Compatibility, "CUDA minor version compatibility", docs.nvidia.com/deploy/cuda-compatibility
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}

# bits of clocks_event_reasons.active; source: nvml.h, nvmlClocksEventReasons. Idle and chosen clocks are no complaint
_HEAT, _POWER_BRAKE = 0x20 | 0x40, 0x80
_SLOWDOWN, _POWER_CAP = 0x8, 0x4


def gpus(machine: Machine) -> Iterator[Finding]:
    ran = machine.run(["nvidia-smi", "-L"], 20.0)
    if ran is None:
        message = "no NVIDIA driver here (no nvidia-smi): every op runs on the CPU, and checks of GPUs are left out"
        if machine.torch_cuda:
            fix = "install NVIDIA's driver; in a container: run it with --gpus all"
            yield Finding("warning", message, (f"torch is a CUDA {machine.torch_cuda} build",), fix)
        else:
            yield Finding("ok", message)
        return
    if ran.status == 124:
        fix = "sudo dmesg | grep -i xid   # a GPU that fell off the bus; a reboot brings it back"
        yield Finding("problem", "nvidia-smi does not answer: a GPU or the driver hangs", (ran.output[:300],), fix)
        return
    if ran.status:
        fix = "reboot, if the driver was just updated; else reinstall it"
        yield Finding("problem", "nvidia-smi fails", (ran.output.strip()[:300],), fix)
        return
    if not machine.gpus:
        yield Finding("problem", "a driver, but no GPU", (ran.output.strip()[:300],), "lspci | grep -i nvidia")
        return
    for gpu in machine.gpus:
        if gpu.is_lost:
            fix = "sudo dmesg | grep -i xid   # a GPU that fell off the bus; a reboot brings it back"
            yield Finding("problem", f"GPU {gpu.index} does not answer: {gpu.name}", (ran.output.strip()[:300],), fix)
            continue
        arch = f"sm_{gpu.arch}" if gpu.arch else "arch unknown"
        # of a GPU that has the host's memory nvidia-smi reports none
        memory = f"{gpu.memory_mib / 1024:.0f} GiB" if gpu.memory_mib else "no memory of its own reported"
        yield Finding("ok", f"GPU {gpu.index}: {gpu.name}, {arch}, {memory}, driver {gpu.driver}")
    yield from _visible(machine)


def _visible(machine: Machine) -> Iterator[Finding]:
    chosen = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    numbers = [int(name) for name in names if name.isdigit()]
    missing = [number for number in numbers if number >= len(machine.gpus)]
    evidence = (f"CUDA_VISIBLE_DEVICES={chosen}",)
    if not names or "-1" in names:
        yield Finding("warning", "every GPU is hidden from CUDA", evidence, "unset CUDA_VISIBLE_DEVICES")
    elif missing:
        message = f"GPU {missing[0]} does not exist: CUDA ignores it and every GPU named after it"
        yield Finding("problem", message, evidence, "unset CUDA_VISIBLE_DEVICES")


def driver(machine: Machine) -> Iterator[Finding]:
    """The driver against the CUDA that torch was built for."""
    if not machine.driver or not machine.torch_cuda:
        return
    installed, major = machine.driver, int(machine.torch_cuda.split(".")[0])
    needed = MINIMUM_DRIVER.get(major)
    evidence = (f"driver {installed}", f"torch was built for CUDA {machine.torch_cuda}")
    if needed is None:
        return
    if int(installed.split(".")[0]) < needed:
        message = f"the driver is too old for CUDA {major}: it needs {needed} or newer"
        older = max((m for m, least in MINIMUM_DRIVER.items() if least <= int(installed.split(".")[0])), default=None)
        fix = f"update the driver to {needed} or newer" + (f", or install torch for CUDA {older}" if older else "")
        yield Finding("problem", message, evidence, fix)
    else:
        yield Finding("ok", f"driver {installed} runs CUDA {machine.torch_cuda}")


def mixed(machine: Machine) -> Iterator[Finding]:
    """GPUs of several archs, and of several memory sizes."""
    found = [gpu for gpu in machine.gpus if not gpu.is_lost]
    if len(found) < 2:
        return
    archs = Counter(gpu.arch for gpu in found if gpu.arch)
    evidence = tuple(f"GPU {gpu.index}: {gpu.name}, sm_{gpu.arch}, {gpu.memory_mib} MiB" for gpu in found)
    if len(archs) > 1:
        listed = " ".join(f"{arch // 10}.{arch % 10}" for arch in sorted(archs))
        message = (
            f"mixed archs: {', '.join(f'sm_{arch}' for arch in sorted(archs))}. Libraries that choose a kernel by "
            "'the current device', or were built for one of them, fail on the other"
        )
        fix = f'build extensions with TORCH_CUDA_ARCH_LIST="{listed}"; run one job per kind with CUDA_VISIBLE_DEVICES'
        yield Finding("warning", message, evidence, fix)
    elif len({gpu.memory_mib for gpu in found}) > 1:
        message = "GPUs of different memory: data parallelism is bounded by the smallest"
        yield Finding("warning", message, evidence, "run one job per size with CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("ok", f"{len(found)} GPUs, all {found[0].name}")


def clocks(machine: Machine) -> Iterator[Finding]:
    """Why each GPU's clock is below its maximum, as NVML gives it."""
    if not machine.gpus:
        return
    # the name before driver 535
    for word in ("event", "throttle"):
        query = f"--query-gpu=index,clocks_{word}_reasons.active,temperature.gpu,clocks.sm,clocks.max.sm"
        ran = machine.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], 20.0)
        if ran and not ran.status:
            break
    else:
        output = (ran.output.strip()[:200],) if ran else ()
        yield Finding("warning", "nvidia-smi does not report clock limits", output, "update the driver")
        return
    lines = [re.split(r"\s*,\s*", line.strip()) for line in ran.output.splitlines() if line.strip()]
    slow = [finding for line in lines if (finding := _slow(line))]
    yield from slow or [Finding("ok", "nothing but load and chosen clocks limits a GPU's clock now")]


def _slow(line: list[str]) -> Finding | None:
    index, reasons, celsius, now, most = line
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    evidence = (f"GPU {index}: reasons {reasons}, {celsius} C, {now} of {most} MHz",)
    if bits & _HEAT:
        fix = "look at fans, air flow and power limit: nvidia-smi -q -d TEMPERATURE,PERFORMANCE"
        return Finding("problem", f"GPU {index} is slowed down by heat", evidence, fix)
    if bits & (_SLOWDOWN | _POWER_BRAKE):
        fix = "check the power supply and its cables: nvidia-smi -q -d POWER,PERFORMANCE"
        return Finding(
            "problem", f"GPU {index} is slowed down by its hardware (power brake or slowdown)", evidence, fix
        )
    if bits & _POWER_CAP:
        fix = "nvidia-smi -q -d POWER   # normal under full load; raise a lowered limit with nvidia-smi -pl"
        return Finding("warning", f"GPU {index} is at its power limit", evidence, fix)
    return None


CHECKS = (
    Check("gpus", "which GPUs are there, and does the driver answer?", gpus),
    Check("driver", "is the driver new enough for torch's CUDA?", driver),
    Check("mixed", "are the GPUs alike?", mixed),
    Check("clocks", "does anything slow them down?", clocks),
)
