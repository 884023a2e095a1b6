"""Are the hosts of a hostfile ready to train together? Names, ssh without a password, versions, the rendezvous address.

A line of a hostfile is a host, with its GPUs after it: `node1 slots=8` (DeepSpeed, Open MPI), `node1:8` (MPICH), or the
name alone. The first host is where rank 0 runs.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine

SSH_SECONDS = 5
_MOST = 4 << 20  # bytes of a hostfile
# BatchMode: without it ssh asks for a password and waits
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS}")

# the program each host runs with its own Python: versions without importing torch, the arch of its GPUs
_ASK = """
import importlib.metadata as m, json, platform, subprocess
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
try: gpus = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                           capture_output=True, text=True, timeout=15).stdout.strip().splitlines()
except (OSError, subprocess.TimeoutExpired): gpus = []
names = ("torch", "triton", "powertrain", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformer-engine")
print("FACTS " + json.dumps({"python": platform.python_version(), "gpus": gpus, **{n: version(n) for n in names}}))
"""


@dataclass(frozen=True)
class Host:
    name: str
    slots: int | None  # ranks on it; None: the file does not say


def read_hostfile(file: Path) -> list[Host]:
    """Its hosts, in order. Raises ValueError naming file and line."""
    hosts = []
    for number, line in enumerate(_text(file).splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([\w.\-]+)(?::(\d+)|\s+(?:slots|max_slots)\s*=\s*(\d+).*)?", text)
        if not match:
            raise ValueError(f"{file}:{number}: must be HOST, HOST:N or HOST slots=N, got {text[:200]!r}")
        # to ssh, and to mpiexec, it would be an option
        if match[1].startswith("-"):
            raise ValueError(f"{file}:{number}: a host must not begin with '-', got {match[1][:200]!r}")
        slots = match[2] or match[3]
        if slots and len(slots) > 6:
            raise ValueError(f"{file}:{number}: N must be below a million, got {slots[:20]}")
        hosts.append(Host(match[1], int(slots) if slots else None))
    if not hosts:
        raise ValueError(f"{file}: must name at least one host, got none")
    return hosts


def _text(file: Path) -> str:
    if file.stat().st_size > _MOST:
        raise ValueError(f"{file}: must be a hostfile of at most {_MOST} bytes, got {file.stat().st_size}")
    return file.read_bytes().decode(errors="replace")


def check_hosts(file: Path) -> Check:
    return Check("hosts", "are these hosts ready to train together?", partial(hosts, file=file))


def hosts(machine: Machine, file: Path) -> Iterator[Finding]:
    try:
        listed = read_hostfile(file)
    except ValueError as error:
        yield Finding("problem", str(error), fix=f"correct {file}")
        return
    twice = [name for name, count in Counter(host.name for host in listed).items() if count > 1]
    if twice:
        yield Finding("problem", f"{twice[0]} is listed twice", fix=f"give it one line with slots=N in {file}")
    with ThreadPoolExecutor(16) as pool:
        asked = dict(zip(listed, pool.map(lambda host: ask(machine, host), listed), strict=True))
    for host, answer in asked.items():
        yield _ssh_finding(host, answer)
    answers = {host: answer for host, answer in asked.items() if isinstance(answer, dict)}
    yield from _versions(answers)
    if len(answers) == len(listed):
        yield from _rendezvous(machine, listed, {host: len(answer["gpus"]) for host, answer in answers.items()})


def ask(machine: Machine, host: Host) -> dict[str, Any] | str:
    """The host's facts, or why there are none."""
    command = f"{shlex.quote(machine.python)} -c {shlex.quote(_ASK)}"
    ran = machine.run([*_SSH, "--", host.name, command], SSH_SECONDS + 25.0)
    if ran is None:
        return "there is no ssh here"
    facts = re.search(r"^FACTS (\{.*\})$", ran.output, re.M)
    if facts:
        return json.loads(facts[1])
    last = [line for line in ran.output.splitlines() if line.strip()]
    return last[-1] if last else f"ssh ended with {ran.status}"


def _ssh_finding(host: Host, answer: dict[str, Any] | str) -> Finding:
    if isinstance(answer, dict):
        count = len(answer["gpus"])
        if host.slots is not None and 0 < count < host.slots:
            message = f"{host.name} has {count} GPUs, the file gives it {host.slots} ranks"
            return Finding("problem", message, fix=f"write slots={count}")
        return Finding("ok", f"{host.name}: ssh without a password, Python {answer['python']}, {count} GPUs")
    if "Permission denied" in answer or "password" in answer:
        return Finding("problem", f"{host.name} asks for a password", (answer,), f"ssh-copy-id {host.name}")
    if "Could not resolve" in answer or "Name or service not known" in answer:
        fix = f"add {host.name} to DNS or /etc/hosts, or write its address into the hostfile"
        return Finding("problem", f"{host.name} has no address", (answer,), fix)
    if re.search(r"verification failed|IDENTIFICATION HAS CHANGED", answer):
        fix = f"ssh {host.name}   # once, to look at its key; if it changed for a reason: ssh-keygen -R {host.name}"
        return Finding("problem", f"{host.name}'s key is unknown, or another than before", (answer,), fix)
    if "No such file" in answer or "not found" in answer:
        fix = "install the same environment at the same path on every host"
        return Finding("problem", f"{host.name} has no Python at the path of this one", (answer,), fix)
    return Finding("problem", f"{host.name} cannot be reached by ssh", (answer,), f"ssh -v {host.name}")


def _versions(answers: dict[Host, dict[str, Any]]) -> Iterator[Finding]:
    if len(answers) < 2:
        return
    differ = False
    for name in sorted({name for answer in answers.values() for name in answer} - {"gpus"}):
        values = {host.name: str(answer[name]) for host, answer in answers.items()}
        if len(set(values.values())) > 1:
            differ = True
            most = Counter(values.values()).most_common(1)[0][0]
            evidence = tuple(f"{host}: {version}" for host, version in values.items())
            fix = f"install {name}=={most} everywhere" if name != "python" else f"use Python {most} everywhere"
            yield Finding("problem", f"{name} differs between hosts", evidence, fix)
    kinds = {host.name: tuple(answer["gpus"]) for host, answer in answers.items()}
    if len(set(kinds.values())) > 1:
        evidence = tuple(f"{host}: {', '.join(gpus) or 'no GPU'}" for host, gpus in kinds.items())
        yield Finding("warning", "GPUs or drivers differ between hosts", evidence, "group equal hosts into one job")
    elif not differ:
        yield Finding("ok", f"the same versions on {len(answers)} hosts")


def _rendezvous(machine: Machine, listed: list[Host], gpus: dict[Host, int]) -> Iterator[Finding]:
    """Whether every host reaches the first one's port, and the lines that start a job."""
    first, port = listed[0].name, machine.variables.get("MASTER_PORT", "29500")
    address = machine.variables.get("MASTER_ADDR", first)
    if address in ("localhost", "127.0.0.1") and len(listed) > 1:
        fix = f"export MASTER_ADDR={first}"
        yield Finding("problem", f"MASTER_ADDR={address} means another machine on each host", fix=fix)
        return
    if not port.isdigit() or not 1024 <= int(port) <= 65535:
        fix = "export MASTER_PORT=29500"
        yield Finding("problem", f"MASTER_PORT must be a number from 1024 to 65535, got {port!r}", fix=fix)
        return
    yield from _reach(machine, listed, address, int(port))
    counts = [host.slots or gpus[host] or 1 for host in listed]
    yield from (Finding("ok", line) for line in launch_lines(listed, counts, address, port))


_LISTEN = """
import socket, sys
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try: s.bind(("", int(sys.argv[1])))
except OSError as e: print("TAKEN", e); raise SystemExit
s.listen(); s.settimeout(float(sys.argv[2])); print("LISTENING", flush=True)
try:
    for _ in range(int(sys.argv[3])): s.accept()
except TimeoutError: pass
"""

_CONNECT = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[3]); error = None
while time.monotonic() < end:
    try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close(); print("REACHED"); raise SystemExit
    except OSError as e: error = e; time.sleep(0.2)
print("MISSED", error)
"""


def _reach(machine: Machine, listed: list[Host], address: str, port: int) -> Iterator[Finding]:
    others = listed[1:] or listed

    def remote(host: Host, source: str, *arguments: str) -> str:
        words = " ".join(map(shlex.quote, (machine.python, "-c", source, *arguments)))
        ran = machine.run([*_SSH, "--", host.name, words], SSH_SECONDS + 25.0)
        return ran.output if ran else ""

    with ThreadPoolExecutor(len(others) + 1) as pool:
        listening = pool.submit(remote, listed[0], _LISTEN, str(port), "15", str(len(others)))
        replies = list(pool.map(lambda host: remote(host, _CONNECT, address, str(port), "10"), others))
        output = listening.result()
    if "TAKEN" in output:
        fix = "export MASTER_PORT=" + str(port + 1)
        yield Finding("problem", f"port {port} of {listed[0].name} is taken", (output.strip(),), fix)
        return
    missed = {host.name: reply.strip() for host, reply in zip(others, replies, strict=True) if "REACHED" not in reply}
    if missed:
        message = f"{', '.join(missed)} cannot reach {address}:{port}"
        fix = f"open port {port} (and NCCL's) between the hosts; or set MASTER_ADDR to an address they share"
        yield Finding("problem", message, tuple(f"{host}: {output}" for host, output in missed.items()), fix)
    else:
        yield Finding("ok", f"{address}:{port} is reached from every host")


def launch_lines(listed: list[Host], counts: list[int], address: str, port: str) -> tuple[str, ...]:
    """torchrun, once on every host, and mpiexec, once."""
    lines = []
    if len(set(counts)) == 1:
        for rank, host in enumerate(listed):
            lines.append(
                f"{host.name}: torchrun --nnodes={len(listed)} --node-rank={rank} --nproc-per-node={counts[0]} "
                f"--master-addr={address} --master-port={port} -m powertrain train run.yml"
            )
    else:
        lines.append("torchrun wants as many ranks on every host; the file gives " + ", ".join(map(str, counts)))
    placed = ",".join(f"{host.name}:{count}" for host, count in zip(listed, counts, strict=True))
    lines.append(
        f"mpiexec -np {sum(counts)} -H {placed} -x MASTER_ADDR={address} -x MASTER_PORT={port} -x PATH "
        "-bind-to none python -m powertrain train run.yml"
    )
    return tuple(lines)
