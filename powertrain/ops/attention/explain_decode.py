"""Which kernel computes a call of `decode_attention`, and why the others do not."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.decode_op import Choice, asked
from powertrain.ops.attention.step_schedule import check_schedule
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target

_OP = "explain_decode_attention"
Kernel = Literal["hopper", "hopper-mla", "universal", "reference"]
_DESCRIPTIONS: dict[Kernel, str] = {
    "hopper": "the sm_90 attention forward, reading the KV cache",
    "hopper-mla": "the sm_90 decoding kernel for MLA caches",
    "universal": "the decoding kernel for every GPU",
    "reference": "plain PyTorch; reads the lengths on the host",
}


@dataclass(frozen=True)
class DecodeExplanation:
    """The kernel for one GPU or the CPU; `str()` is the answer as text."""

    name: str
    kernel: Kernel
    reasons: dict[str, str]  # why each preferred kernel does not compute the call
    launches: tuple[str, ...]  # names of the launched kernels, the append included; empty if unknown

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.kernel}, {_DESCRIPTIONS[self.kernel]}"]
        lines += [f"  why not {kernel}: {reason}" for kernel, reason in self.reasons.items()]
        return "\n".join([*lines, f"  launches {', '.join(self.launches)}"] if self.launches else lines)


@hinted
def explain_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    cache_seqlens: Tensor,
    *,
    arch: str | None = None,
    **arguments: Any,
) -> DecodeExplanation:
    """Which kernel computes a call of `decode_attention`, and why the others do not. Computes and writes nothing.

    query, key_cache, value_cache, cache_seqlens   of the call, on any device, also "meta" (which needs an arch)
    arch       the GPU to answer for, "H200" or "sm_80"; "cpu"; None: the tensors' device
    arguments  those of `decode_attention`
    Raises ValueError as the call itself would, but for values of lengths and page ids, which are not read.
    """
    checks.tensor(_OP, "query", query)
    checks.require(arch is not None or not query.is_meta, _OP, "arch", "be given with tensors on device meta", arch)
    on_cpu = arch == "cpu" or (arch is None and query.device.type == "cpu")
    # a call on the CPU is checked as that of a GPU is, any: stand-ins have no values that its plain PyTorch could read
    target = Target.parse("sm_90") if on_cpu else Target.of(query.device) if arch is None else Target.parse(arch)
    by_reference = arguments.get("backend") == "reference"
    checks.require(
        not on_cpu or arguments.get("backend") != "triton", _OP, "arch", "be a GPU for backend 'triton'", "cpu"
    )
    given = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "cache_seqlens": cache_seqlens}
    call = {name: _stand_in(x, on_cpu) for name, x in (given | arguments).items()}
    call |= {"backend": None} if by_reference else {}
    # of the lengths that stand-ins do not have; no kernel is chosen by it
    schedule = call.pop("schedule", None)
    if schedule is not None and isinstance(cache_seqlens, Tensor):
        check_schedule(schedule, cache_seqlens)
    choices: list[Choice] = []
    token = asked.set(choices)
    try:
        # the call itself, checks included, on tensors without memory
        with torch.no_grad(), record(target) as recorded:
            decode_attention(**call)
    finally:
        asked.reset(token)
    if on_cpu or by_reference:
        name, reason = ("cpu", "kernels run on a GPU") if on_cpu else (target.name, "backend is 'reference'")
        return DecodeExplanation(name, "reference", {"universal": reason}, ())
    launches = tuple(spec.kernel.name.strip("_") for spec in recorded.specs)
    (choice,) = choices
    if target.arch != 90:
        # another limit may have been checked first: without it these kernels would not run either
        choice = Choice(*[f"it runs on sm_90 only, got sm_{target.arch}"] * 2)
    # the limit of both kernels that a stand-in does not have
    elif any(x is not None and not x.is_meta and x.data_ptr() % 16 for x in (query, key_cache, value_cache)):
        unaligned = "an address is not a multiple of 16 bytes"
        choice, launches = Choice(choice.hopper or unaligned, choice.hopper_mla or unaligned), ()
    if choice.hopper is None:
        return DecodeExplanation(target.name, "hopper", {}, launches)
    if choice.hopper_mla is None:
        return DecodeExplanation(target.name, "hopper-mla", {"hopper": choice.hopper}, launches)
    reasons = {"hopper": choice.hopper, "hopper-mla": choice.hopper_mla}
    return DecodeExplanation(target.name, "universal", reasons, launches)


def _stand_in(x: Any, on_cpu: bool) -> Any:
    """A tensor's sizes and strides without memory; of float64, which the CPU takes, in float32."""
    if isinstance(x, RopeTable):
        return RopeTable(*(_stand_in(part, on_cpu) for part in x))
    if not isinstance(x, Tensor):
        return x
    dtype = torch.float32 if on_cpu and x.dtype == torch.float64 else x.dtype
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
