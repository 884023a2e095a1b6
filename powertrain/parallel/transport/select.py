"""Choice of a transport: the best whose probes pass. Each fallback is logged with the probe that failed."""

import socket
from typing import Any

import torch
import torch.distributed as dist

from powertrain.parallel.transport.base import Transport, on_gpus
from powertrain.parallel.transport.collective import CollectiveTransport
from powertrain.parallel.transport.heartbeat import Peer
from powertrain.runtime import checks, tracing

NAMES = ("auto", "symmetric", "pipelined", "sequential")
# bytes/s: PCIe 5 x16 is slower, every NVLink faster
SLOWEST_LINK = 60e9


class TransportUnavailable(RuntimeError):
    """The transport that was asked for cannot serve this group; the message names the probe that failed."""


def open_transport(group: dist.ProcessGroup, name: str, *, strict: bool, debug: bool) -> Transport:
    """The transport of that name, or the best one; collective over the group.

    Raises TransportUnavailable, on every rank, if it was asked for by name or strictly and cannot be had.
    """
    checks.one_of("Overlap", "transport", name, NAMES)
    if name in ("auto", "symmetric") and group.size() > 1:
        symmetric = _open_symmetric(group, debug)
        if not isinstance(symmetric, str):
            return symmetric
        if strict or name == "symmetric":
            raise TransportUnavailable(f"Overlap: no symmetric memory among these {group.size()} ranks: {symmetric}")
        if group.rank() == 0 and on_gpus(group):
            tracing.warn(f"overlap goes through {dist.get_backend(group)} sends, not symmetric memory: {symmetric}")
    return CollectiveTransport(group, sequential=name == "sequential", debug=debug)


def _open_symmetric(group: dist.ProcessGroup, debug: bool) -> Transport | str:
    """The transport, or which probe failed. The same answer on every rank."""
    problem = _agreed_problem(group, _problem_here(group))
    if problem:
        return problem
    from powertrain.parallel.transport.symmetric import SymmetricTransport
    from powertrain.parallel.transport.symmetric_fused import Fused

    transport, problem, rate = None, "", 0.0
    try:
        transport = SymmetricTransport(
            group, torch.device("cuda", torch.cuda.current_device()), fused=Fused, debug=debug
        )
        rate = transport.measure_link()
    except RuntimeError as error:
        problem = f"memory cannot be shared: {str(error).splitlines()[0]}"
    # collective before any rank decides: one that fell back alone would leave the others waiting
    problem = _agreed_problem(group, problem)
    rate = _slowest(group, rate)
    if not problem and rate < SLOWEST_LINK:
        problem = (
            f"{rate / 1e9:.0f} GB/s between GPUs is PCIe, not NVLink: `nvidia-smi topo -m` shows which GPUs are "
            "linked; put a group's ranks on those"
        )
    if transport is None or problem:
        return problem
    transport.link_rate = rate
    return transport


def _problem_here(group: dist.ProcessGroup) -> str:
    """Why symmetric memory cannot be used, as far as this rank knows before the probe; "" if nothing is known."""
    if not on_gpus(group):
        return "its tensors are on the CPU"
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    machine_here, host_here = Peer.here(group.rank()).machine, socket.gethostname()
    uuid_here, index_here = str(here.uuid), torch.cuda.current_device()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (machine_here, host_here, uuid_here, index_here), group=group)
    for rank, (machine, host, uuid, index) in enumerate(everyone):
        if rank == group.rank():
            continue
        if machine != machine_here:
            return f"ranks are on several hosts ({host_here}, {host}): make one axis of the mesh per host"
        if uuid == uuid_here:
            return f"ranks {group.rank()} and {rank} use the same GPU: set each to its own with torch.cuda.set_device"
        if index != index_here and not torch.cuda.can_device_access_peer(index_here, index):
            return (
                f"GPU {index_here} cannot reach GPU {index}'s memory: `nvidia-smi topo -p2p r` says why (IOMMU or ACS "
                "of the PCIe bridges, a virtual machine without peer access)"
            )
    return ""


def _agreed_problem(group: dist.ProcessGroup, problem: str) -> str:
    """The first rank's problem that has one, on every rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, problem, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text), "")


def _slowest(group: dist.ProcessGroup, rate: float) -> float:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, rate, group=group)
    return min(everyone)
