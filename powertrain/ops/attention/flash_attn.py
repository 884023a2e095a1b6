"""The flash-attn packages as backends, where they are installed: versions 2, 3 and 4 of Tri Dao's kernels.

Their limits: the interfaces of flash-attn 2.8, FlashAttention-3 (hopper/) and flash-attn-4 4.0.0 beta.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.installed import installed
from powertrain.ops.attention.limits import KnownBad, Limits, known_bad
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason
from powertrain.ops.attention.sdpa import FLASH_BAD, from_bhsd, to_bhsd


def _not_installed(package: str, install: str) -> Iterator[Reason]:
    if installed().version(package) is None:
        yield Reason(f"{package} is not installed", install)


def _bshd(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (to_bhsd(x, call.layout).transpose(1, 2) for x in (call.query, call.key, call.value))
    return q, k, v


def _result(call: AttentionCall, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if not call.return_lse or lse is None:
        lse = None
    else:  # +inf where a row sees nothing
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return from_bhsd(out.transpose(1, 2), call.layout), lse


class FlashAttention2:
    name = "flash-attn-2"
    draws_keep = False
    limits = Limits("flash-attn-2", window=True, alibi=True, softcap=True, dropout=True, deterministic=True)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn", "pip install flash-attn, or use flash")
        yield from self.limits.why_not(problem)
        yield from known_bad(FLASH_BAD, problem)
        if problem.dropout and problem.mask.softcap:
            yield Reason("flash-attn-2 has softcap or dropout, not both", "use triton, or dropout_p=0")

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        mask = call.mask
        q, k, v = _bshd(call)
        out = importlib.import_module("flash_attn").flash_attn_func(
            q, k, v, call.dropout_p, call.scale, mask.is_causal, (mask.left, mask.right), mask.softcap,
            call.tensors.alibi_slopes, call.deterministic, call.return_lse,
        )  # fmt: skip
        out, lse = out[:2] if call.return_lse else (out, None)
        return _result(call, out, lse)


class FlashAttention3:
    name = "flash-attn-3"
    draws_keep = False
    limits = Limits("flash-attn-3", archs=(90, 90), head_dims_differ=True, window=True, softcap=True, compiles=False)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn-3", "build it from flash-attention's folder hopper, or use flash-attn-4")
        yield from self.limits.why_not(problem)
        d, dv = problem.head_dim_qk, problem.head_dim_v
        if d != dv and not (128 < d <= 192 and 96 < dv <= 128):
            text = f"flash-attn-3 takes unequal head dims of 129 to 192 with 97 to 128 only, got {d} and {dv}"
            yield Reason(text, "use triton or flash-attn-4, or equal head dims")

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        mask = call.mask
        q, k, v = _bshd(call)
        result = importlib.import_module("flash_attn_interface").flash_attn_func(
            q, k, v, softmax_scale=call.scale, causal=mask.is_causal, window_size=(mask.left, mask.right),
            softcap=mask.softcap, deterministic=call.deterministic, return_attn_probs=call.return_lse,
        )  # fmt: skip
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        return _result(call, out, lse)


FLASH4_BAD = (
    KnownBad(
        "flash-attn-4 plans every GPU of a process for the arch that it saw first, and this process has several",
        "use triton, or show the process one kind of GPU (CUDA_VISIBLE_DEVICES)",
        "flash_attn/cute/interface.py, _get_device_arch",
        lambda p, here: len(set(here.archs)) > 1,
    ),
)


class FlashAttention4:
    """Compiles at first use: a call of a kind not seen before is waited for under our deadline, with a line."""

    name = "flash-attn-4"
    draws_keep = False
    limits = Limits(
        "flash-attn-4", archs=(80, 120), head_dims_differ=True, window=True, sinks=True, compiles=False
    )  # fmt: skip

    def __init__(self) -> None:
        self._warm: set[Any] = set()

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn-4", "pip install powertrain[flash]")
        yield from self.limits.why_not(problem)
        yield from known_bad(FLASH4_BAD, problem)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError
