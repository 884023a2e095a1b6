"""What the host spends: calls of rms_norm, attention, decode, a Llama-8B layer and AdamW; one launch; first use."""

import compileall
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import powertrain
from powertrain import attention, decode_attention
from powertrain.ops import norm, norm_fwd_kernels
from powertrain.ops.adamw import AdamW
from powertrain.runtime.extras import MissingExtra
from powertrain.testing.bench import Variants, host_us, measure_host, note

# constants of the one launch that is timed: rows of 1024 columns
LAUNCH: dict[str, Any] = {
    "LEVELS": 1, "IS_LAYER": False, "ZERO_CENTERED": False, "ROUND_FIRST": False, "BLOCK_M": 4, "BLOCK_N": 1024,
    "BLOCK_TAIL": 0, "WEIGHTS_FIRST": False, "STARTS_EARLY": False, "num_warps": 4,
}  # fmt: skip
_FIRST_USE = """
import time, torch, powertrain.ops.norm as norm
x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
norm.rms_norm(x)
torch.cuda.synchronize()
print(f"{(time.perf_counter() - start) * 1e3:.0f}")
"""
# seconds from the start to the end of each part; of a scalar the gradient, since for others PyTorch imports sympy
_FIRST_ATTENTION = """
import sys, time
parts, start = [], float(sys.argv[2])
def end(name):
    parts.append(f"{name} {time.time() - start:.2f}")
import torch
end("import torch")
if sys.argv[1] == "powertrain":
    from powertrain import attention
    end("import powertrain")
else:
    def attention(q, k, v, is_causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
shapes = [(1, 1024, heads, 128) for heads in (32, 8, 8)]
q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
torch.cuda.synchronize()
end("CUDA")
out = attention(q, k, v, is_causal=True)
torch.cuda.synchronize()
end("forward")
out.sum().backward()
torch.cuda.synchronize()
end("backward")
print(", ".join(parts))
"""


def _step(op: object, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = w.grad = None
    op(x, w).backward(dy)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True)


def _attention_inputs(device: str) -> list[torch.Tensor]:
    heads = 32, 8, 8
    return [torch.randn(1, 128, n, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for n in heads]


def _attention() -> Iterator[str]:
    q, k, v = _attention_inputs("cuda")
    dout = torch.randn_like(q)
    with_heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    calls = {
        "powertrain": ((q, k, v), dout, _causal),
        "torch": (
            with_heads_first,
            dout.transpose(1, 2).contiguous(),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ),
    }
    forwards, steps = {}, {}
    for name, (inputs, grad, op) in calls.items():
        forwards[name] = partial(op, *(x.detach() for x in inputs))
        steps[name] = lambda op=op, inputs=inputs, grad=grad: torch.autograd.grad(op(*inputs), inputs, grad)
    # PyTorch's kernels serve below sm_90, and dropout on it
    by_flash = partial(attention, is_causal=True, backend="flash")
    inputs, grad, _ = calls["powertrain"]
    flash = {
        "powertrain": lambda: torch.autograd.grad(by_flash(*inputs), inputs, grad), "torch": steps["torch"],
    }  # fmt: skip
    label = "attention 1x128, heads 32/8, host"
    yield from _rows(f"{label}, forward", forwards)
    yield from _rows(f"{label}, with backward", steps)
    yield from _rows(f"{label}, by PyTorch's flash, with backward", flash)


def _decode_inputs(device: str) -> list[torch.Tensor]:
    shapes = (1, 1, 32, 128), (1, 2048, 8, 128), (1, 2048, 8, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [q, k, v, torch.tensor([2000], device=device, dtype=torch.int32)]


def _decode() -> Iterator[str]:
    q, k, v, lengths = _decode_inputs("cuda")
    calls = {
        "powertrain": lambda: decode_attention(q, k, v, lengths),
        "torch": lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
    }
    yield from _rows("decode, batch 1, 2048 keys, host, forward", calls)


def _layer_inputs(device: str) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Its configuration, our layer, its input, and the result's gradient. Needs the extra `train`."""
    from powertrain.models import llama

    config = llama.Config(
        vocab_size=256, hidden_size=4096, num_layers=1, num_heads=32, num_kv_heads=8, intermediate_size=14336,
        max_position_embeddings=128,
    )  # fmt: skip
    with torch.device(device):
        ours = llama._block(config, 0).bfloat16()
    x, dy = (torch.randn(1, 128, 4096, device=device).bfloat16() for _ in range(2))
    return config, ours, x.requires_grad_(), dy


def _layer_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    from powertrain.nn.attention import Context

    y, residual = module(x, None, Context())
    return y + residual


def _layer(device: str = "cuda") -> Iterator[str]:
    """128 tokens, so that the GPU waits for the host."""
    from benchmarks.train import twin

    config, ours, x, dy = _layer_inputs(device)
    with torch.device(device):
        plain = twin.Twin(config).bfloat16()
    layer, compiled = plain.layers[0], torch.compile(plain.layers[0], dynamic=False)
    forwards = {
        "powertrain": partial(_layer_of, ours, x),
        "torch": partial(layer, x, plain.cos, plain.sin),
        "torch.compile": partial(compiled, x, plain.cos, plain.sin),
    }
    parameters = {"powertrain": ours, "torch": layer, "torch.compile": layer}
    steps = {
        name: lambda call=call, name=name: torch.autograd.grad(call(), [x, *parameters[name].parameters()], dy)
        for name, call in forwards.items()
    }
    label = "Llama-8B layer, 1x128, host"
    with torch.no_grad():
        yield from _rows(f"{label}, forward", forwards)
    yield from _rows(f"{label}, with backward", steps)


def _lora_params(device: str) -> list[torch.Tensor]:
    """As many as LoRA has for the seven products of 32 layers."""
    params = [torch.randn(16, 4096, device=device, requires_grad=True) for _ in range(448)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def _optimizer() -> Iterator[str]:
    ours, theirs = (_lora_params("cuda") for _ in range(2))
    mine, fused = AdamW(ours), torch.optim.AdamW(theirs, fused=True)

    def clip_then_step() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        fused.step()

    label = "AdamW, 448 tensors of 16x4096, host"
    yield from _rows(f"{label}, step", {"powertrain": mine.step, "torch": fused.step})
    # gradients that are clipped once are within the norm: ours are clipped at each step, torch's at the first
    clipped = {"powertrain": lambda: mine.step(max_norm=0.5), "torch": clip_then_step}
    yield from _rows(f"{label}, clipping step", clipped)


def _rows(label: str, variants: Variants) -> Iterator[str]:
    for name, timing in measure_host(variants).items():
        note(label, name, timing)
        yield f"{label:48} {name:12} {timing.ms * 1e3:6.1f} us ±{timing.spread:4.0%}"


def _norm_inputs(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """x, weight, the result's gradient, and copies of x and weight that want gradients."""
    x, dy = (torch.randn(128, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    w = torch.ones_like(x[0])
    return x, w, dy, (x.clone().requires_grad_(), w.clone().requires_grad_())


def _launch_arguments(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
    y, rstd = torch.empty_like(x), torch.empty(128, device=x.device)
    return (x, None, w, None, y, None, None, rstd, 128, 1024, 128, 1, 1024, 0, 0, 0, 0, 0, 1e-6)


def launch() -> None:
    """Ours on meta tensors: for `ahead.build`."""
    x, w, dy, leaves = _norm_inputs("meta")
    norm.rms_norm(x, w)
    _step(norm.rms_norm, *leaves, dy)
    norm_fwd_kernels._norm_fwd_kernel[(32,)](*_launch_arguments(x, w), **LAUNCH)
    inputs = _attention_inputs("meta")
    torch.autograd.grad(_causal(*inputs), inputs, torch.empty_like(inputs[0]))
    _causal(*(x.detach() for x in inputs))
    optimizer = AdamW(_lora_params("meta"))
    optimizer.step()
    optimizer.step(max_norm=0.5)
    decode_attention(*_decode_inputs("meta"))
    with suppress(MissingExtra):
        _, ours, x, dy = _layer_inputs("meta")
        with torch.no_grad():
            _layer_of(ours, x)
        torch.autograd.grad(_layer_of(ours, x), [x, *ours.parameters()], dy)


def run() -> Iterator[str]:
    x, w, dy, leaves = _norm_inputs("cuda")
    ops = {"powertrain": norm.rms_norm, "torch": lambda x, w: F.rms_norm(x, (1024,), w, 1e-6)}
    label = "rms_norm 128x1024, host"
    yield from _rows(f"{label}, forward", {name: partial(op, x, w) for name, op in ops.items()})
    yield from _rows(f"{label}, with backward", {name: partial(_step, op, *leaves, dy) for name, op in ops.items()})
    yield from _attention()
    yield from _decode()
    yield from _optimizer()
    try:
        yield from _layer()
    except MissingExtra as error:
        yield f"Llama-8B layer, host: left out, {error}"
    arguments = _launch_arguments(x, w)
    kernel = norm_fwd_kernels._norm_fwd_kernel
    for name, launch in {"powertrain": kernel[(32,)], "triton": kernel.jit[(32,)]}.items():
        launch(*arguments, **LAUNCH)
        microseconds = host_us(lambda launch=launch: launch(*arguments, **LAUNCH))
        yield f"one warm launch, host, {name:12} {microseconds:6.1f} us"

    yield from _first_use()


def _first_use() -> Iterator[str]:
    """Of a process, with an empty store and with what that has left."""
    # as pip does when it installs: where Python writes no bytecode, each process would compile the modules
    compileall.compile_dir(Path(powertrain.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as store:

        def output(*command: str) -> str:
            environment = {**os.environ, "POWERTRAIN_STORE": store}
            line = [sys.executable, "-c", *command]
            return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip()

        for state in ("cold", "warm"):
            yield f"first rms_norm of a process, {state} store: {output(_FIRST_USE)} ms"
        # PyTorch's first, so that the files of both are in the page cache
        for name, state in (
            ("torch", ""),
            ("torch", ""),
            ("powertrain", ", cold store"),
            ("powertrain", ", warm store"),
        ):
            parts = output(_FIRST_ATTENTION, name, str(time.time()))
            yield f"first attention of a process, {name}{state}, s: {parts}"
