"""`Overlap`: the transport and the cost model of one group of ranks."""

import atexit
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from powertrain.parallel.cost_model import Planner
from powertrain.parallel.transport.base import RowCounts, Transport
from powertrain.parallel.transport.heartbeat import compare_calls, first_call
from powertrain.parallel.transport.select import NAMES, open_transport
from powertrain.runtime import checks

# by the group's name: a torch.library op takes no Python objects, so a traced call looks its overlap up
_open: dict[str, "Overlap"] = {}


class Overlap:
    """One group's transport and planner: the last argument of the functions in powertrain.parallel.

        overlap = Overlap(mesh["tp"])
        y = all_gather_gemm(x, weight, overlap)

    group       a ProcessGroup, or one axis of a DeviceMesh
    transport   "auto" (the best whose probes pass), "symmetric", "pipelined" or "sequential"
    strict      raise TransportUnavailable instead of stepping down to the next one; a step down is said once either way
    debug       ranks compare each call's shapes and order first: CollectiveMismatch instead of a hang

    Collective: every rank of the group makes it, and its calls, in the same order. Several groups may have one each;
    one group has one: making it again gives the same object, until `close()`; its arguments must be the same then.
    Raises ValueError naming the argument.
    """

    group: dist.ProcessGroup
    transport: Transport
    planner: Planner

    def __new__(
        cls,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        transport: str = "auto",
        strict: bool = False,
        debug: bool = False,
    ) -> "Overlap":
        group = _process_group(group)
        existing = _open.get(group.group_name)
        # a name may come again for another group, once the first one is destroyed
        if existing is not None and existing.group is group:
            existing._check_serves(transport, strict, debug)
            return existing
        checks.one_of("Overlap", "transport", transport, NAMES)
        if group.size() > 1:
            # ranks that open different transports would wait for each other's first message
            with first_call("Overlap"):
                compare_calls(f"Overlap(transport={transport!r}, strict={strict}, debug={debug})", group)
        self = object.__new__(cls)
        self._adopt(open_transport(group, transport, strict=strict, debug=debug), group.group_name)
        self.group = group
        return self

    @classmethod
    def over(cls, transport: Transport, key: str) -> "Overlap":
        """An Overlap over an existing transport, such as a rank of powertrain.parallel.transport.simulated."""
        self = object.__new__(cls)
        self._adopt(transport, key)
        return self

    def _adopt(self, transport: Transport, key: str) -> None:
        self.transport, self.key = transport, key
        self.rank, self.size = transport.rank, transport.size
        self.planner = Planner(transport, transport.rates())
        _open[key] = self

    def key_for(self, layer: str) -> str:
        """Key of this object for `find`, in a layer of that name."""
        return f"{self.key}|{layer}" if layer else self.key

    def _check_serves(self, transport: str, strict: bool, debug: bool) -> None:
        """Raise ValueError if the arguments differ from those of the group's open overlap."""
        # a second Overlap of one group would need a second set of buffers
        checks.one_of("Overlap", "transport", transport, NAMES)
        mine, stays = self.transport.name, "for a group whose overlap is open (close() it first)"
        if self.size > 1:
            checks.require(transport in ("auto", mine), "Overlap", "transport", f"be auto or {mine} {stays}", transport)
            checks.require(
                not strict or mine == "symmetric", "Overlap", "strict", f"be False over {mine} {stays}", strict
            )
        has = getattr(self.transport, "debug", False)
        checks.require(has or not debug, "Overlap", "debug", f"be False {stays}", debug)

    def rows(self, count: int, counts: Sequence[int] | None = None) -> RowCounts:
        """Ownership of rows: `count` on every rank, or `counts`."""
        if counts is None:
            return RowCounts((count,) * self.size)
        checks.require(len(counts) == self.size, "Overlap", "rows", f"have {self.size} entries", list(counts))
        checks.require(
            counts[self.rank] == count, "Overlap", "rows", f"be {count}, x's rows, at rank {self.rank}", list(counts)
        )
        return RowCounts(tuple(counts))

    def exchange_rows(self, count: int) -> list[int]:
        """Every rank's count, for calls whose ranks hold different numbers of rows. Waits for the others' counts."""
        device = "cuda" if self.transport.on_gpus else "cpu"
        local_count = torch.tensor([count], device=device)
        gathered = local_count.new_empty(self.size)
        # by a collective of the group: it has to be called by all ranks anyway
        with self.transport.waiting("exchange of row counts", local_count):
            dist.all_gather(list(gathered.split(1)), local_count, group=self.group)
        counts: list[int] = gathered.tolist()
        return counts

    def __deepcopy__(self, _: object) -> "Overlap":
        """Returns self: copies of a model communicate over the same group."""
        return self

    def explain(self) -> str:
        """The choice for each product so far, and its reason."""
        return self.planner.explain()

    def close(self) -> None:
        """Release memory and threads; the group itself stays. A pending backward over it raises."""
        if _open.get(self.key) is self:
            del _open[self.key]
            self.transport.close()


def close_all() -> None:
    """Close every open overlap of this process."""
    for overlap in list(_open.values()):
        overlap.close()


@atexit.register
def _detach_all() -> None:
    """At exit: end threads and release process groups before the interpreter ends; later this can crash the process."""
    for overlap in list(_open.values()):
        overlap.transport.detach()
        overlap.__dict__.pop("group", None)
    _open.clear()


def find(key: str) -> Overlap:
    """The open overlap of a key made by `key_for`; sets the layer's name of the transport, for its messages."""
    key, _, layer = key.partition("|")
    overlap = _open.get(key)
    if overlap is not None:
        overlap.transport.layer = layer
    # a backward after close() would wait for ever
    if overlap is None:
        must = "be open until the last backward and the last replay of its calls"
        checks.fail("Overlap", "overlap", must, f"that of group {key}, which was closed")
    return overlap


def _process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        checks.require(group.ndim == 1, "Overlap", "group", 'be one axis of a mesh, as mesh["tp"]', group)
        return group.get_group()
    good = isinstance(group, dist.ProcessGroup)
    checks.require(good, "Overlap", "group", "be a ProcessGroup or one axis of a DeviceMesh", repr(group))
    return group
