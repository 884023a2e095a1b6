"""Cost model of a GEMM and its collective: overlapped (in one kernel or in chunks), or in sequence.

The times are predicted, not measured: a product by the waves of 128 x 256 tiles it takes on the device's SMs, a
transfer by the link rate that was measured when the transport was opened. All ranks have the same numbers, so all
choose alike without asking each other.
"""

from typing import Literal, NamedTuple

import torch

from powertrain.parallel.transport.base import Choice, Rates, Transport
from powertrain.runtime import checks

# the tile by which waves are counted
_TILE_M, _TILE_N = 128, 256
# measured on four H200s (benchmarks/results/2026-11-21_h200_overlap.md), in seconds, bytes/s and share
_PRODUCT_START = 5e-6  # from one product's end to the next one's start
# a copy engine's time for a small copy, with the words around it
_COPY_START = 12e-6
# overhead of an overlapped call: publishing or summing, the flags of all peers
_CALL_OVERHEAD = 25e-6
_COLLECTIVE_START = 30e-6
_COLLECTIVE_RATE = 0.85  # of the link rate
# of the link rate, when copies from one peer follow those from another
_SERIAL_COPY_RATE = 0.88
# host time of an overlapped call: one that the device finishes sooner would wait for the host
_HOST_OVERHEAD = 200e-6
# bytes of each rank from which one kernel beat chunks (0.681 ms against 0.705), where the transfer is the longer part
_MIN_BYTES_FUSED = 64 << 20
# bytes of each rank from which rows are sent in pieces where no link was measured: small calls lose when overlapped
_MIN_BYTES_UNMEASURED = 4 << 20
# bound of the cache: token counts may differ in every call
_MAX_CHOICES = 256
# an overlapped call must be predicted to take less than this share of the sequential one
_MAX_SHARE = 0.98


class Product(NamedTuple):
    """gather: [rows, depth] is gathered, then multiplied; scatter: [rows, width] is the product, then scattered."""

    kind: Literal["gather", "scatter"]
    rows: int
    width: int
    depth: int
    dtype: torch.dtype


class Planner:
    """Chooses once for each kind and size of GEMM, and caches the choice."""

    def __init__(self, transport: Transport, rates: Rates | None = None) -> None:
        self.transport, self.rates = transport, rates
        self.choices: dict[Product, Choice] = {}

    def choose(self, product: Product) -> Choice:
        choice = self.choices.get(product)
        if choice is None:
            # the oldest goes: dicts keep insertion order
            if len(self.choices) >= _MAX_CHOICES:
                del self.choices[next(iter(self.choices))]
            choice = self.choices[product] = self._chosen(product)
        return choice

    def _chosen(self, product: Product) -> Choice:
        name = self.transport.name
        if name == "sequential":
            return Choice("sequential", "asked for")
        # a rank without rows would take part in the transfers only
        if product.rows < self.transport.size:
            return Choice("sequential", "fewer rows than ranks")
        # without rates that all ranks measured together, ranks could choose differently and wait for each other for
        # ever
        if self.rates is None:
            small = self.transport.on_gpus and _bytes_per_peer(product, self.transport.size) < _MIN_BYTES_UNMEASURED
            why = "too little to send in pieces" if small else "nothing is known of this device's speed"
            return Choice("sequential" if small else "chunked", f"{name}: {why}")
        return predict(product, self.transport.size, self.rates)

    def explain(self) -> str:
        """A line for each product: alone, collective alone, exposed, bound, choice and why."""
        return "\n".join(_line(product, choice) for product, choice in self.choices.items())


def product_seconds(rows: int, width: int, depth: int, rates: Rates) -> float:
    """Predicted seconds of a GEMM [rows, depth] x [depth, width], in whole waves of tiles."""
    # a product's time grows by whole waves: a few tiles more than the SMs cost as much as twice the tiles
    waves = -(-(-(-rows // _TILE_M) * -(-width // _TILE_N)) // rates.sms)
    # every tile of a wave takes the time of one
    return waves * 2 * _TILE_M * _TILE_N * depth / (rates.flops / rates.sms)


def predict(product: Product, size: int, rates: Rates) -> Choice:
    """The faster way for one product on `size` ranks."""
    _, rows, width, depth, _ = product
    chunk, nbytes = -(-rows // size), _bytes_per_peer(product, size)
    alone = product_seconds(rows, width, depth, rates)
    collective = _COLLECTIVE_START + (size - 1) * nbytes / (_COLLECTIVE_RATE * rates.link)
    step = _COPY_START + nbytes / (_SERIAL_COPY_RATE * rates.link)
    chunked = _CALL_OVERHEAD + _pipeline(product_seconds(chunk, width, depth, rates), step, size)
    # the GPU would wait for the host's launches, so nothing would be hidden
    if chunked < _HOST_OVERHEAD:
        why = f"overlapped it would take {chunked * 1e3:.3f} ms, less than the host takes to launch it"
        return Choice("sequential", why, alone, collective, chunked)
    # within 2 % the prediction cannot tell, and sequential is simpler
    if chunked > _MAX_SHARE * (alone + collective):
        why = f"overlapped it would take {chunked * 1e3:.3f} ms, one after the other less"
        return Choice("sequential", why, alone, collective, chunked)
    # scatters never: the kernel that stored into the owner's buffer took 0.584 ms where chunks took 0.485
    if product.kind == "gather" and nbytes >= _MIN_BYTES_FUSED and alone < collective:
        return Choice("fused", "one kernel waits for pieces smaller than a chunk", alone, collective, chunked)
    return Choice("chunked", "transfers are hidden by the products", alone, collective, chunked)


def _bytes_per_peer(product: Product, size: int) -> int:
    """Bytes that each rank sends to each other one."""
    width = product.depth if product.kind == "gather" else product.width
    return -(-product.rows // size) * width * product.dtype.itemsize


def _pipeline(product: float, step: float, size: int) -> float:
    """Seconds until the last of `size` GEMMs ends: the first needs no transfer, each of the others one step."""
    # this rank's own rows are here
    ended = product + _PRODUCT_START
    for peer in range(1, size):
        # a product begins when the one before is done and its rows are here
        ended = max(ended, peer * step) + product + _PRODUCT_START
    return ended


def _line(product: Product, choice: Choice) -> str:
    p, c = product, choice
    shape = f"{'all-gather, then' if p.kind == 'gather' else ''} {p.rows}x{p.depth} by {p.depth}x{p.width}".strip()
    name = f"{shape}{', then reduce-scatter' if p.kind == 'scatter' else ''}, {checks.name(p.dtype)}"
    if not c.collective:
        return f"{name}: {c.way} ({c.why})"
    # the most that overlapping can give: the longer of the two remains
    bound = (c.product + c.collective) / max(c.product, c.collective)
    return (
        f"{name}: {c.way} ({c.why}); predicted: product {c.product * 1e3:.3f} ms, "
        f"collective {c.collective * 1e3:.3f} ms, exposed {c.exposed:.0%}, at best {bound:.2f}x"
    )
