"""The flash-attn packages as backends, where they are installed: versions 2, 3 and 4 of Tri Dao's kernels.

Their limits: the interfaces of flash-attn 2.8, FlashAttention-3 (hopper/) and flash-attn-4 4.0.0 beta.
"""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.backends.requirements import KnownBad, Limits, known_bad
from powertrain.ops.attention.backends.sdpa import FLASH_BAD
from powertrain.ops.attention.backends.versions import installed
from powertrain.ops.attention.layouts import from_bhsd, to_bhsd
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, Use, use
from powertrain.runtime import tracing
from powertrain.runtime.errors import CompileError, CompileTimeout, WarmUpFirst
from powertrain.runtime.settings import settings


def _not_installed(package: str, *changes: str | Use) -> Iterator[Reason]:
    if installed().version(package) is None:
        yield Reason(f"{package} is not installed", *changes)


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
    uses_philox_seed = False
    limits = Limits("flash-attn-2", window=True, alibi=True, softcap=True, dropout=True, deterministic=True)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn", "pip install flash-attn", use("flash"))
        yield from self.limits.why_not(problem)
        yield from known_bad(FLASH_BAD, problem)
        if problem.dropout and problem.mask.softcap:
            yield Reason("flash-attn-2 has softcap or dropout, not both", use("triton"), "dropout_p=0")

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
    uses_philox_seed = False
    limits = Limits("flash-attn-3", archs=(90, 90), head_dims_differ=True, window=True, softcap=True, compiles=False)

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn-3", "build it from flash-attention's folder hopper", use("flash-attn-4"))
        yield from self.limits.why_not(problem)
        d, dv = problem.head_dim_qk, problem.head_dim_v
        if d != dv and not (128 < d <= 192 and 96 < dv <= 128):
            text = f"flash-attn-3 takes unequal head dims of 129 to 192 with 97 to 128 only, got {d} and {dv}"
            yield Reason(text, use("triton", "flash-attn-4"), "equal head dims")

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
        (use("triton"), "show the process one kind of GPU (CUDA_VISIBLE_DEVICES)"),
        "flash_attn/cute/interface.py, _get_device_arch",
        lambda p, here: len(set(here.archs)) > 1,
    ),
    KnownBad(
        "flash-attn-4 has no backward below sm_90",
        (use("triton", "flash"), "torch.no_grad()"),
        "flash_attn/cute/interface.py, _flash_attn_bwd",
        lambda p, here: p.needs_grad and 0 < p.arch < 90,
    ),
    KnownBad(
        "flash-attn-4 gives wrong gradients on sm_90 for head dims that are no multiples of 32",
        (use("triton", "cudnn"), "a multiple of 32"),
        "seen with 4.0.0b36 on an H200: errors above 1 at 48, 72, 80 and 112; 32, 64, 96, 128, 160, 192, 256 are right",
        lambda p, here: p.needs_grad and p.arch == 90 and (p.head_dim_qk % 32 > 0 or p.head_dim_v % 32 > 0),
    ),
    KnownBad(
        "flash-attn-4's backward wants equal head dims with fewer key heads, and else equal ones or 192/128, on sm_90",
        (use("triton", "cudnn"), "equal head dims"),
        "flash_attn/cute/flash_bwd_sm90.py",
        lambda p, here: (
            p.needs_grad
            and p.arch == 90
            and p.head_dim_qk != p.head_dim_v
            and (p.is_grouped or (p.head_dim_qk, p.head_dim_v) != (192, 128))
        ),
    ),
    KnownBad(
        "flash-attn-4 takes head dims up to 128, 192/128 and 256/256 on sm_10x, and up to 128 elsewhere but on sm_90",
        (use("triton"), "one of those head dims"),
        "flash_attn/cute/interface.py, _validate_head_dims",
        lambda p, here: (
            max(p.head_dim_qk, p.head_dim_v) > 128
            and p.arch != 90
            and not (p.arch in (100, 103) and (p.head_dim_qk, p.head_dim_v) in ((192, 128), (256, 256)))
        ),
    ),
)


class FlashAttention4:
    """Compiles at first use: the kernels of a new kind of call first, under our deadline and with a line."""

    name = "flash-attn-4"
    note = "compiles at first use; a call of a new kind waits for that, at most POWERTRAIN_COMPILE_TIMEOUT"
    uses_philox_seed = False
    limits = Limits("flash-attn-4", head_dims_differ=True, window=True, compiles=False)

    def __init__(self) -> None:
        self._warm: set[Any] = set()

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        yield from _not_installed("flash-attn-4", "pip install 'powertrain[flash]'")
        yield from self.limits.why_not(problem)
        yield from known_bad(FLASH4_BAD, problem)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        q, k, v = _bshd(call)
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        kind = (
            q.device, q.dtype, q.shape[2:], k.shape[2], v.shape[3], call.mask.left >= 0, call.mask.right, needs_grad,
            q.shape[1] > 128,
        )  # fmt: skip
        if kind not in self._warm:
            self._compile(call, q, k, v, needs_grad)
            self._warm.add(kind)
        out, lse = self._forward(call, q, k, v)
        return _result(call, out, lse)

    @staticmethod
    def _forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = call.mask
        causal = mask.is_causal and mask.left < 0
        left, right = (None if n < 0 else n for n in (mask.left, mask.right))
        out, lse = importlib.import_module("flash_attn.cute").flash_attn_func(
            q, k, v, softmax_scale=call.scale, causal=causal, window_size=(None, None) if causal else (left, right),
            return_lse=call.return_lse,
        )  # fmt: skip
        return out, lse

    def _compile(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, needs_grad: bool) -> None:
        """Run the call once, and its backward if it will have one, on a thread that may be given up."""
        if torch.cuda.is_current_stream_capturing():
            raise WarmUpFirst(f"{self.name} would have to compile inside graph capture: run the call once before")
        stream, failed = torch.cuda.current_stream(q.device), []
        tensors = [x.detach().requires_grad_(needs_grad) for x in (q, k, v)]

        def work() -> None:
            try:
                with torch.cuda.device(q.device), torch.cuda.stream(stream), torch.set_grad_enabled(needs_grad):
                    out, _ = self._forward(call, *tensors)
                    if needs_grad:
                        torch.autograd.grad(out, tensors, torch.zeros_like(out))
            except Exception as error:  # raised again by the caller's thread
                failed.append(error)

        wait_for(work, f"{self.name} compiles for {tuple(q.shape)} {q.dtype}")
        if failed:
            way = 'attention_backend("-flash-attn-4") takes another backend'
            error = f"{type(failed[0]).__name__}: {failed[0]}"
            raise CompileError(f"{self.name} could not be compiled or run ({error}); {way}") from failed[0]


_PATIENCE = 2.0  # seconds before a line names the work


def wait_for(work: Callable[[], None], name: str) -> None:
    """Run `work` on a thread of its own, with a line when it takes long. Raises CompileTimeout at our deadline; the
    thread, which nothing can end, is left behind."""
    deadline = settings().compile_timeout
    thread = threading.Thread(target=work, daemon=True)
    start = time.monotonic()
    thread.start()
    thread.join(min(_PATIENCE, deadline))
    if thread.is_alive():
        tracing.progress(f"{name} ... at most {deadline:g} s")
        thread.join(max(0.0, deadline - (time.monotonic() - start)))
    if thread.is_alive():
        raise CompileTimeout(
            f"{name}: not done after {deadline:g} s; set POWERTRAIN_COMPILE_TIMEOUT, or forbid it: "
            "POWERTRAIN_ATTENTION=-flash-attn-4"
        )
    seconds = time.monotonic() - start
    tracing.event("attention", f"{name}: {seconds:.1f} s", milliseconds=seconds * 1e3)
