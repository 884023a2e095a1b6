"""Communication of ranks overlapped with their computation: functions, transports, cost model."""

from powertrain.runtime.lazy_exports import resolve

# public name -> module; resolved on first use, as powertrain's own are
_PUBLIC = {
    "Overlap": "powertrain.parallel.overlap",
    "all_gather_gemm": "powertrain.parallel.collective_matmul",
    "gemm_reduce_scatter": "powertrain.parallel.collective_matmul",
    "gemm_all_reduce": "powertrain.parallel.collective_matmul",
    "replicated_gemm": "powertrain.parallel.collective_matmul",
    "context_parallel": "powertrain.parallel.context.api",
    "moe_experts": "powertrain.parallel.experts",
    "PeerTimeout": "powertrain.parallel.transport.heartbeat",
    "CollectiveMismatch": "powertrain.parallel.transport.heartbeat",
    "TransportUnavailable": "powertrain.parallel.transport.select",
    "World": "powertrain.parallel.transport.simulated",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> object:
    return resolve(__name__, name, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
