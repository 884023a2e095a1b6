"""Rank of this process in a run, rendezvous, and process groups.

Launchers set them in the environment: torchrun in RANK, WORLD_SIZE ..., Open MPI in OMPI_COMM_WORLD_*, MVAPICH2 in
MV2_COMM_WORLD_*, MPICH and Intel MPI in PMI_* and MPI_LOCAL*, Flux in FLUX_*, jsrun in JSM_NAMESPACE_*, srun in
SLURM_*, HPE Cray's PALS in PALS_* and PMI_*. They are read in that order, so the innermost of several counts.
"""

import functools
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from powertrain.models.parallelize import AXES
from powertrain.parallel.transport.heartbeat import Heartbeat, PeerTimeout, listed
from powertrain.runtime import tracing
from powertrain.runtime.reading import one_line
from powertrain.train import preflight
from powertrain.train.agreement import is_on_all
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import UnreadableSample
from powertrain.train.mesh_shape import check_parallel, mesh_shape

T = TypeVar("T")

_QUIET = 5.0  # seconds a wait may take before a line names its reason
# seconds that a process may take to disappear after its connections did
_DYING = 5.0
# messages of gloo and NCCL when a connection ends
_LOST = re.compile(r"[Cc]onnection (?:closed|reset|refused)|Broken pipe|gloo|NCCL|[Tt]imed out|Socket|remote process")
_MOST_PORT = 65535
# of the compared facts
_SIZE = "number of ranks"
# seconds that the first rank stays, after an error, for the others to read it
_END_TIMEOUT = 10.0


class RendezvousError(RuntimeError):
    """Ranks are missing, or must not train together; the message names them and the reason."""


class Rendezvous(NamedTuple):
    """Rendezvous of the processes of a run.

    attempt     number of elastic restarts; keys in the store are separate for each
    by_agent    torchrun hosts the store, else rank 0 does
    """

    host: str
    port: int
    attempt: int = 0
    by_agent: bool = False


@dataclass(frozen=True)
class LaunchEnv:
    """The launcher's facts of this process, before the rendezvous."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"
    rendezvous: Rendezvous | None = None


@dataclass(frozen=True)
class Ranks:
    """rank, world_size     among all processes;  local_rank: on this host
    dp_rank, dp_size        among those that read different data
    mesh                    pipeline x replicate x shard x context x tensor; None: one process, nothing distributed
    dp_group                those that read different data
    checkpoint_group        a gloo group for checkpoints alone: they are written beside the training, and the order of
                            collectives within a group must be the same on every rank
    peers                   liveness of the ranks
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    mesh: DeviceMesh | None = None
    dp_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    peers: Heartbeat | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks; None: one process."""
        return dist.group.WORLD if self.world_size > 1 else None

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a value over all ranks, which is that over the data-parallel ones; the tensor itself is changed.

        Over all, so that ranks which share their data derive the same values from it.
        """
        if self.world_size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            # a sum and a division, since gloo has no mean
            value /= self.world_size
        return value

    def sum_over_data(self, value: Tensor) -> Tensor:
        """The sum over the ranks that read different data; the tensor itself is changed."""
        if self.dp_group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.dp_group)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. For messages, not for speed."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


class _Launcher(NamedTuple):
    """A launcher's variables. Only rank and size are sure to be there; `hint` says how to hand it MASTER_ADDR.

    local_size  "": there is none, or it is not a number; `_local_size` finds it otherwise
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    hint: str


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
              "torchrun sets both; started by hand, export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500"),
    _Launcher("mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE", "mpiexec -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."),
    _Launcher("mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
              "MV2_COMM_WORLD_LOCAL_SIZE",
              "mpirun_rsh ... MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 python ..."),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
              "mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ..."),
    _Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "",
              "flux run --env=MASTER_ADDR=<host of rank 0> --env=MASTER_PORT=29500 ..."),
    _Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
              "JSM_NAMESPACE_LOCAL_SIZE", "jsrun -E MASTER_ADDR=<host of rank 0> -E MASTER_PORT=29500 ..."),
    # of the step: in a batch script's own shell SLURM_PROCID and SLURM_NTASKS are there too, though it runs alone
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "",
              "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 before srun"),
    # behind srun and Flux, which set these on a Cray too; the size has PMI's name alone
    _Launcher("mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE",
              "mpiexec --env MASTER_ADDR=<host of rank 0> --env MASTER_PORT=29500 ..."),
)  # fmt: skip


def read_launch_env(environment: Mapping[str, str] | None = None) -> LaunchEnv:
    """The launch environment that the variables name; alone, on the first GPU or the CPU, if it names none.

    Raises ValueError naming the variable for one that is missing or no number, and for a GPU that is not there.
    """
    env = os.environ if environment is None else environment
    active = [launcher for launcher in _LAUNCHERS if launcher.rank in env and _is_launched_by(launcher, env)]
    if not active:
        if "PMIX_RANK" in env:
            raise ValueError(
                "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT must be set: PMIx names no number of ranks, "
                f"got PMIX_RANK {env['PMIX_RANK']} alone"
            )
        for launcher in _LAUNCHERS:
            _refuse_half(launcher, env)
        return LaunchEnv(_device(0, 1))
    first, *others = active
    rank, size = _number(env, first.rank), _number(env, first.size)
    if not 0 <= rank < size:
        raise ValueError(f"{first.rank} must be in [0, {first.size} = {size}), got {rank}")
    local_rank = _number(env, first.local_rank, 0)
    local_size = _local_size(first, env, size, local_rank)
    if first.local_size in env and not local_rank < local_size <= size:
        raise ValueError(
            f"{first.local_rank} must be below {first.local_size}, and that at most {first.size} ({size}), "
            f"got {local_rank} and {local_size}"
        )
    if others and rank == 0:
        names = ", ".join(f"{other.rank}={env[other.rank]}" for other in others)
        tracing.event("launcher", f"rank and number of processes are {first.name}'s ({first.rank}); {names} not read")
    device = _device(local_rank, local_size)
    rendezvous = _read_rendezvous(first, size, env) if size > 1 else None
    return LaunchEnv(device, rank, size, local_rank, local_size, first.name, rendezvous)


def _is_launched_by(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    """Whether a launcher whose rank is there started this process: several set the ranks of Open MPI or PMI as well."""
    # in a batch script's environment too, which its step's size is not
    if launcher.name == "srun":
        return launcher.size in env
    if launcher.rank == "OMPI_COMM_WORLD_RANK":
        jsrun = env.get("JSM_NAMESPACE_RANK"), env.get("JSM_NAMESPACE_SIZE")
        return jsrun != (env[launcher.rank], env.get(launcher.size))
    # without the local rank of MPICH's own mpiexec
    return launcher.rank != "PMI_RANK" or launcher.local_rank in env or not any(name in env for name in _ALSO_PMI)


# of launchers that speak PMI too, for MPI
_ALSO_PMI = ("FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "SLURM_STEP_NUM_TASKS", "PALS_RANKID")


def _local_size(launcher: _Launcher, env: Mapping[str, str], size: int, local_rank: int) -> int:
    """Processes on this host; where the launcher does not say, as many as the local rank shows at least."""
    if launcher.local_size in env:
        return _number(env, launcher.local_size)
    known = 1
    if launcher.name == "srun":
        known = _slurm_local_size(env)
    elif launcher.name == "flux":
        known = -(-size // max(1, _number(env, "FLUX_JOB_NNODES", size)))
    return max(known, min(local_rank + 1, size))


def _refuse_half(launcher: _Launcher, env: Mapping[str, str]) -> None:
    """Half of a launcher's variables, as where a job's script exports them by hand: each process would be a run of its
    own. An empty one is unset there, and those of one process may stay."""
    if launcher.rank in env:
        return
    for name, alone in ((launcher.size, "1"), (launcher.local_size, "1"), (launcher.local_rank, "0")):
        if env.get(name) not in (None, "", alone):
            raise ValueError(f"{launcher.rank} must be set beside {name}, got {name} {env[name]} alone")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.strip().isdecimal():
        raise ValueError(f"{name} must be a number, as the launcher sets it, got {repr(value) if value else 'nothing'}")
    return int(value)


def _device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and local_size > 1:
        # the launcher shows each process its own; preflight sees it if not
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ValueError(
            f"local rank must be below the {count} GPUs that this process sees, got {local_rank}: "
            "start fewer processes a host, or check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


def _read_rendezvous(launcher: _Launcher, size: int, env: Mapping[str, str]) -> Rendezvous:
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    nodes = env.get("SLURM_STEP_NODELIST") if launcher.name == "srun" else None
    if nodes:
        host = host or first_host(nodes)
        # the same on every rank, another one for the next job on these hosts
        port = port or str(20000 + _number(env, "SLURM_JOB_ID", 0) % 10000 + _number(env, "SLURM_STEP_ID", 0) % 10)
    if not host or not port:
        missing = " and ".join(name for name, v in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not v)
        raise ValueError(
            f"{missing} must be set for {size} processes of {launcher.name} to meet, got nothing: {launcher.hint}"
        )
    # 0 is any port that is free, which no other rank would know
    if not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
        raise ValueError(f"MASTER_PORT must be a number from 1 to {_MOST_PORT}, the same on every rank, got {port!r}")
    # part of the rendezvous's name: ranks of a run that torchrun restarted must not meet those of the last one
    attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
    return Rendezvous(host, int(port), attempt, env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def first_host(nodes: str) -> str:
    """The first of Slurm's compressed list: `gpu[03-07,11],cpu1` -> gpu03."""
    first = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts, got {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _slurm_local_size(env: Mapping[str, str]) -> int:
    """Tasks on this host: `2(x3),1` is 2 on each of three hosts and 1 on the fourth."""
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [(int(n), int(times or 1)) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)]
    each = [n for n, times in counts for _ in range(times)]
    node = _number(env, "SLURM_NODEID", 0)
    return each[node] if node < len(each) else 1


def be_deterministic(device: torch.device) -> None:
    """The same bits every run: PyTorch's switch and, before the first use of the GPU, cuBLAS's workspace."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def connect(launch_env: LaunchEnv, config: RunConfig) -> Ranks:
    """Join the others: they are compared (powertrain/train/preflight.py), then groups and the mesh are made.

    Waits for ranks that are late, while they build kernels say: after 5 s a line names them, after
    parallel.timeout_minutes RendezvousError does.
    """
    check_parallel(config, launch_env.world_size)
    if launch_env.world_size == 1:
        return Ranks(launch_env.device)
    if dist.is_initialized():
        # before the meeting, at which ranks that have none would wait
        raise RendezvousError(
            f"rank {launch_env.rank}: torch.distributed must not be initialized where a run of several ranks begins, "
            f"which makes its own process groups, got a process group of {dist.get_world_size()} ranks; call "
            "torch.distributed.destroy_process_group() before"
        )
    with _naming_the_meeting(launch_env):
        return _connect(launch_env, config)


@contextmanager
def _naming_the_meeting(launch_env: LaunchEnv) -> Iterator[None]:
    """Raise RendezvousError instead of the error of a store or a collective when a rank ends while ranks connect."""
    try:
        yield
    except RendezvousError:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        where = launch_env.rendezvous
        assert where is not None
        raise RendezvousError(
            f"rank {launch_env.rank}: another rank was lost while they connected; look at the output of the others, of "
            f"rank 0 first, which is at {where.host}:{where.port} (MASTER_ADDR, MASTER_PORT): {one_line(error, 120)}"
        ) from None


def _connect(launch_env: LaunchEnv, config: RunConfig) -> Ranks:
    timeout = timedelta(minutes=config.parallel.timeout_minutes)
    facts = preflight.facts(launch_env.device, config) | {_SIZE: str(launch_env.world_size)}
    store = _rendezvous(launch_env, facts, timeout.total_seconds())
    on_gpu = launch_env.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(launch_env.device)
    # no device_id: with one the mesh splits groups, which in torch 2.11 crashes when a process connects a second time
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=launch_env.rank, world_size=launch_env.world_size,
        timeout=timeout,
    )  # fmt: skip
    return arrange(launch_env, config)


def arrange(launch_env: LaunchEnv, config: RunConfig) -> Ranks:
    """The mesh that config.parallel asks for, over the process group that is there."""
    shape = mesh_shape(config.parallel, launch_env.world_size)
    mesh = init_device_mesh(launch_env.device.type, shape, mesh_dim_names=AXES)
    data = mesh["replicate", "shard"]._flatten("data")
    # a store that torchrun's agent holds outlives the ranks; else rank 0 holds it
    agents = launch_env.rendezvous is None or launch_env.rendezvous.by_agent
    return Ranks(
        launch_env.device, launch_env.rank, launch_env.world_size, launch_env.local_rank, data.get_local_rank(),
        data.size(), mesh, data.get_group(),
        dist.new_group(backend="gloo", timeout=timedelta(minutes=config.parallel.timeout_minutes)),
        Heartbeat(dist.distributed_c10d._get_default_group(), None if agents else 0),
    )  # fmt: skip


def disconnect(ranks: Ranks) -> None:
    """Leave the process groups, if there are any."""
    if ranks.peers is not None:
        ranks.peers.close()
    if ranks.world_size > 1:
        dist.destroy_process_group()
    if ranks.peers is not None:
        ranks.peers.wait_until_heard()


@contextmanager
def naming_lost_ranks(ranks: Ranks) -> Iterator[None]:
    """PeerTimeout, in place of the collective's error, where a rank is gone: which, on which host, in which process.

    An error of this rank alone is broadcast to the others, which name it in theirs.
    """
    try:
        yield
    except Exception as error:
        if ranks.peers is None:
            raise
        why = _lost_ranks(ranks.peers) if _may_be_of_another(error) else None
        if why is None:
            # one rank's own failure: the others wait in collectives and would only see a lost connection
            if not is_on_all(error):
                ranks.peers.broadcast_failure(one_line(error))
            raise
        raise PeerTimeout(
            f"rank {ranks.rank}: training cannot go on: {why}; "
            "started again, the run goes on from its newest checkpoint"
        ) from None


def _may_be_of_another(error: Exception) -> bool:
    """Whether the error may be what a collective raises when another rank is gone."""
    if isinstance(error, (dist.DistError, PeerTimeout)):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, UnreadableSample) and bool(_LOST.search(str(error)))
    )


def _lost_ranks(peers: Heartbeat) -> str | None:
    """Given a moment to disappear; a survivor that ended for the same reason has reported it before."""
    deadline = time.monotonic() + _DYING
    while time.monotonic() < deadline:
        # its connections end before it does
        time.sleep(0.05)
        gone = peers.gone()
        if reason := peers.reported_failure():
            return reason
        if gone:
            are, whose = ("are", "their") if len(gone) > 1 else ("is", "its")
            why = f"{listed(gone)} {are} gone: look at {whose} output (killed, or out of memory?)"
            peers.broadcast_failure(why)
            return why
    return None


@functools.cache
def _store(rendezvous: Rendezvous, world_size: int, is_host: bool, seconds: float) -> Store:
    """Kept for the life of the process: several runs in one may meet there."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host, rendezvous.port, world_size, is_host, timedelta(seconds=seconds), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of `work`, or its error; None if there is neither after so many seconds. torch's store waits up to
    twice its time-out for a port that nobody has open, and for ever for a program there that says nothing."""
    outcome: list[tuple[T | None, Exception | None]] = []

    def call() -> None:
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    # one that waits for ever must not hold up the end of the process
    thread = threading.Thread(target=call, name="powertrain-rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    result, error = outcome[0] if outcome else (None, None)
    if error is not None:
        raise error
    return result


def _unknown(host: str) -> str:
    """Why the host's name leads nowhere; "" where it has an address. Asked at the end: a pod may get its name late."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"this machine knows no host {host} ({error.strerror})"
    return ""


_rendezvous_count = itertools.count()


def _rendezvous(launch_env: LaunchEnv, facts: dict[str, str], seconds: float) -> Store:
    """The store that the ranks share, once every rank has come and all are alike.

    Raises RendezvousError, on every rank, naming the missing ranks, or each difference and its ranks.
    """
    rendezvous = launch_env.rendezvous
    assert rendezvous is not None
    where = f"{rendezvous.host}:{rendezvous.port} (MASTER_ADDR, MASTER_PORT)"
    late = threading.Timer(_QUIET, tracing.progress, (f"rank {launch_env.rank} waits for rank 0 to open {where}",))
    late.daemon = True
    late.start()
    try:
        tcp = _within(seconds, lambda: _store(
            rendezvous, launch_env.world_size, launch_env.rank == 0 and not rendezvous.by_agent, seconds
        ))  # fmt: skip
    except dist.DistError as error:
        # at once, and of the rank that opens the store: the port belongs to another program, or to an earlier run
        is_taken = "EADDRINUSE" in str(error)
        why = "which another process has open"
        if not is_taken:
            why = f"for {seconds:.0f} s: {_unknown(rendezvous.host) or error}"
        raise RendezvousError(
            f"rank {launch_env.rank} {'cannot open' if is_taken else 'reached no store at'} {where} {why}"
        ) from None
    finally:
        late.cancel()
    if tcp is None:
        raise RendezvousError(
            f"rank {launch_env.rank} reached no store at {where} for {seconds:.0f} s (parallel.timeout_minutes): "
            f"{_unknown(rendezvous.host) or 'rank 0 has not opened it there, or another program has the port'}"
        )
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"powertrain/{rendezvous.attempt}/{next(_rendezvous_count)}", tcp
    )
    # a store of torchrun's agent may hold an earlier verdict; rank 0's is of these ranks alone
    if not rendezvous.by_agent and store.check(["verdict"]) and not json.loads(store.get("verdict"))["error"]:
        raise RendezvousError(
            f"rank {launch_env.rank}: the ranks at {where} have met without this one: another run has this address, "
            "and this one needs a MASTER_PORT of its own, or this rank was started again or twice"
        )
    store.set(f"facts {launch_env.rank}", json.dumps(facts))
    if launch_env.rank == 0:
        _compare_ranks(store, launch_env.world_size, seconds)
    _wait(lambda: [] if store.check(["verdict"]) else [0], seconds + _END_TIMEOUT, launch_env.rank)
    verdict = json.loads(store.get("verdict"))
    readers = store.add("readers", 1)
    if verdict["error"]:
        deadline = time.monotonic() + _END_TIMEOUT
        # rank 0 hosts the store: it stays until the others have read the error
        while launch_env.rank == 0 and readers < verdict["present"] and time.monotonic() < deadline:
            time.sleep(0.05)
            readers = store.add("readers", 0)
        raise RendezvousError(verdict["error"])
    if launch_env.rank == 0:
        for note in verdict["notes"]:
            tracing.progress(note)
    return store


def _compare_ranks(store: Store, world_size: int, seconds: float) -> None:
    """On the first rank: wait for the facts of all ranks, compare them, publish the result."""
    missing = _wait(lambda: [r for r in range(world_size) if not store.check([f"facts {r}"])], seconds, 0, fail=False)
    present = [rank for rank in range(world_size) if rank not in missing]
    everyone = [json.loads(store.get(f"facts {rank}")) for rank in present]
    error, notes = "", []
    if missing:
        sizes = [(rank, facts[_SIZE]) for rank, facts in zip(present, everyone, strict=True)]
        others = [f"rank {rank} was started as one of {size}; " for rank, size in sizes if size != str(world_size)]
        error = (
            f"{_ranks(missing)} of {world_size} did not arrive within {seconds:.0f} s (parallel.timeout_minutes): "
            f"{''.join(others[:1])}look there for an error, or for a process that was not started"
        )
    else:
        differences = preflight.compare(everyone)
        error, notes = differences.error, list(differences.notes)
    store.set("verdict", json.dumps({"error": error, "notes": notes, "present": len(present)}))


def _wait(missing: Callable[[], list[int]], seconds: float, rank: int, *, fail: bool = True) -> list[int]:
    """Wait until all ranks are present; a line after 5 s. At the deadline the missing ranks, as an error if `fail`."""
    started, reported, pause = time.monotonic(), False, 0.005
    while left := missing():
        waited = time.monotonic() - started
        if waited > seconds:
            if fail:
                raise RendezvousError(f"rank {rank} waited {seconds:.0f} s for {_ranks(left)}")
            return left
        if waited > _QUIET and not reported and rank == 0:
            tracing.progress(f"waiting for {_ranks(left)}, which may be building kernels")
            reported = True
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return []


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{' ...' if len(ranks) > 8 else ''}"
