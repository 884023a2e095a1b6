"""Check that two processes of this machine can communicate: an all-reduce over gloo, over NCCL with two GPUs."""

import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine, Ran

# for both ranks, imports of torch included; a healthy machine takes 5
SECONDS = 60.0

# the program of each rank, in its own process so that a hang can be ended
_RANK = """
import datetime, sys
backend, rank, size, port, seconds = sys.argv[1], *map(int, sys.argv[2:6])
import torch, torch.distributed as dist
limit = datetime.timedelta(seconds=seconds)
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=limit)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((4,), rank + 1.0, device=device)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4, x
print("echo ok", flush=True)
dist.destroy_process_group()
"""


def echo(machine: Machine) -> Iterator[Finding]:
    if machine.version("torch") is None:
        yield Finding("ok", "no torch here: nothing to try")
        return
    yield _verdict("gloo", run_ranks(machine, "gloo", 2, SECONDS))
    if len(machine.gpus) >= 2 and machine.torch_cuda:
        yield _verdict("nccl", run_ranks(machine, "nccl", 2, SECONDS))


def run_ranks(
    machine: Machine, backend: str, size: int, seconds: float, program: tuple[str, ...] = ("-c", _RANK)
) -> Ran:
    """All ranks' output; status 124: at the deadline one still waited, and all were ended.

    program: Python source; its arguments are backend, rank, number of ranks, port and seconds.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="powertrain-echo-") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        logs = [Path(folder) / f"rank{rank}" for rank in range(size)]
        environment = {**machine.variables, "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
        ranks = []
        for rank, log in enumerate(logs):
            command = [machine.python, *program, backend, str(rank), str(size), str(port), f"{seconds:.0f}"]
            with log.open("w") as file:
                ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                              env=environment, start_new_session=True))  # fmt: skip
        deadline = time.monotonic() + seconds
        try:
            for process in ranks:
                process.wait(max(0.0, deadline - time.monotonic()))
            status = max(abs(process.returncode) for process in ranks)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return Ran(status, "\n".join(log.read_text(errors="replace") for log in logs))


def _verdict(backend: str, ran: Ran) -> Finding:
    if ran.status == 0 and ran.output.count("echo ok") == 2:
        return Finding("ok", f"two processes reach each other over {backend}")
    lines = [line for line in ran.output.splitlines() if re.search(r"Error|WARN|error", line)]
    fix = {
        "gloo": "check that 127.0.0.1 is up (ip addr show lo) and that no proxy or firewall takes it",
        "nccl": "NCCL_DEBUG=INFO shows why; try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, to find the path at fault",
    }[backend]
    message = f"two processes do not reach each other over {backend}"
    message += f" within {SECONDS:.0f} s" if ran.status == 124 else f" (exit status {ran.status})"
    return Finding("problem", message, tuple(lines[-3:]), fix)


CHECKS = (Check("echo", "can two processes communicate?", echo),)
