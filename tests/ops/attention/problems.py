"""Random attention problems: a configuration fixes what kernels specialize on, a seed the sizes and the values.

`check(config, seed, device, dtype)` runs one against the judge: our kernels, plain PyTorch in the same dtype, float64.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.reference import run_reference
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason
from powertrain.testing import numerics
from tests.torch_setup import INTERPRET


class _Plain:
    """The judge's plain PyTorch: computed in the tensors' own dtype."""

    name = "plain"
    uses_philox_seed = True

    def why_not(self, problem: AttentionProblem) -> Iterator[Reason]:
        return iter(())

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return run_reference(call, upcast=False)


BACKENDS["plain"] = _Plain()


@dataclass(frozen=True)
class Config:
    name: str
    head_dims: tuple[int, int] = (64, 64)
    layout: str = "bshd"
    heads: tuple[int, int] = (4, 2)  # query, key
    features: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


def _named(name: str, *features: str, **options: Any) -> Config:
    fields = {key: options.pop(key) for key in ("head_dims", "layout", "heads") if key in options}
    return Config(name, features=features, options=tuple(options.items()), **fields)


CAUSAL: dict[str, Any] = {"is_causal": True}
CONFIGS = [
    _named("full"),
    _named("causal", **CAUSAL),
    _named("causal-top-left", **CAUSAL, causal_align="top_left"),
    _named("causal-d128", head_dims=(128, 128), **CAUSAL),
    _named("full-d128", head_dims=(128, 128)),
    _named("causal-192-128", head_dims=(192, 128), **CAUSAL),
    _named("full-192-128", head_dims=(192, 128)),
    _named("causal-d256", head_dims=(256, 256), **CAUSAL),
    _named("causal-d512", head_dims=(512, 512), **CAUSAL),
    _named("full-d40", head_dims=(40, 40)),
    _named("causal-d80", head_dims=(80, 80), **CAUSAL),
    _named("causal-d96", head_dims=(96, 96), **CAUSAL),
    _named("odd-dims", head_dims=(31, 50), **CAUSAL),
    _named("d1-17", head_dims=(1, 17)),
    _named("odd-dims-strided", "strided", head_dims=(111, 7), **CAUSAL),
    _named("narrow-values", "strided", head_dims=(128, 16), heads=(4, 4)),
    _named("d320-8", head_dims=(320, 8)),
    _named("mha", heads=(3, 3), **CAUSAL),
    _named("mqa", heads=(5, 1), **CAUSAL),
    _named("bhsd", layout="bhsd", **CAUSAL),
    _named("sbhd", layout="sbhd", **CAUSAL),
    _named("bmghk-groups", "expand_groups", layout="bmghk", **CAUSAL),
    _named("bmghk-heads", "expand_heads", layout="bmghk", **CAUSAL),
    _named("bmghk", layout="bmghk"),
    _named("expanded-heads", "expand_heads", heads=(4, 4), **CAUSAL),
    _named("strided", "strided", **CAUSAL),
    _named("packed-qkv", "packed", heads=(3, 3), **CAUSAL),
    _named("window", "window"),
    _named("window-causal", "window", **CAUSAL),
    _named("window-d128", "window", head_dims=(128, 128), **CAUSAL),
    _named("chunk", "chunk", **CAUSAL),
    _named("prefix", "prefix", **CAUSAL),
    _named("prefix-window", "prefix", "window"),
    _named("documents", "documents", **CAUSAL),
    _named("documents-random", "documents_random"),
    _named("alibi", "alibi", **CAUSAL),
    _named("alibi-batch", "alibi_batch"),
    _named("bias", "bias"),
    _named("bias-causal-d128", "bias", head_dims=(128, 128), **CAUSAL),
    _named("bias-no-grad", "bias_no_grad", **CAUSAL),
    _named("bias-heads", "bias_heads"),
    _named("bias-batch", "bias_batch", **CAUSAL),
    _named("bias-rows", "bias_rows", **CAUSAL),
    _named("bias-one", "bias_one"),
    _named("bias-bool", "bias_bool"),
    _named("softcap", "softcap", **CAUSAL),
    _named("softcap-window-d128", "softcap", "window", head_dims=(128, 128), **CAUSAL),
    _named("sinks", "sinks", **CAUSAL),
    _named("sinks-window", "sinks", "window", **CAUSAL),
    _named("dropout", "dropout", **CAUSAL),
    _named("dropout-bias", "dropout", "bias_heads"),
    _named("everything", "softcap", "alibi", "sinks", "window", "bias_batch", "dropout", "lengths", **CAUSAL),
    _named("lengths", "lengths"),
    _named("lengths-causal", "lengths", **CAUSAL),
    _named("thd", layout="thd"),
    _named("thd-causal", layout="thd", **CAUSAL),
    _named("thd-causal-d128", layout="thd", head_dims=(128, 128), **CAUSAL),
    _named("thd-192-128", layout="thd", head_dims=(192, 128), heads=(4, 4), **CAUSAL),
    _named("thd-window", "window", layout="thd", **CAUSAL),
    _named("thd-padded", "padded", layout="thd", **CAUSAL),
    _named("thd-self", "self", layout="thd", **CAUSAL),
    _named("thd-everything", "softcap", "alibi", "sinks", "window", "dropout", "padded", layout="thd", **CAUSAL),
]
BY_NAME = {config.name: config for config in CONFIGS}


def _lengths(rng: random.Random, batch: int, largest: int) -> list[int]:
    return [rng.choice((0, 1, rng.randint(1, largest), largest)) for _ in range(batch)]


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def make(config: Config, seed: int, device: torch.device, dtype: torch.dtype, largest: int) -> tuple[Any, dict, dict]:
    """(function, tensors by name, other keyword arguments) of one problem with sequences of up to `largest`."""
    rng = random.Random(f"{config.name} {seed}")
    torch.manual_seed(seed)
    batch = rng.randint(1, 2 if INTERPRET else 3)
    queries, keys = (rng.choice((1, rng.randint(2, largest), largest)) for _ in range(2))
    if "documents" in config.features or "packed" in config.features:
        keys = queries
    options = dict(config.options)
    (heads, kv_heads), (d_qk, d_v) = config.heads, config.head_dims

    def normal(*shape: int, grad: bool = True) -> Tensor:
        pad = rng.choice((3, 8)) if "strided" in config.features else 0
        x = torch.full((*shape[:-1], shape[-1] + pad), float("nan"), device=device, dtype=dtype)
        x = x[..., : shape[-1]]
        return x.copy_(torch.randn(shape, device=device)).requires_grad_(grad)

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if config.layout == "thd":
        q_lengths = _lengths(rng, batch, queries)
        k_lengths = q_lengths if "self" in config.features else _lengths(rng, batch, keys)
        behind = rng.randint(0, 5)
        options["cu_seqlens_q"], options["cu_seqlens_k"] = integers(_starts(q_lengths)), integers(_starts(k_lengths))
        if "padded" in config.features:
            for side, lengths in (("q", q_lengths), ("k", k_lengths)):
                options[f"cu_seqlens_{side}_padded"] = integers(_starts(lengths))
                used = [rng.randint(0, n) for n in lengths]
                options[f"cu_seqlens_{side}"] = integers(_starts(used))
        shapes = [(sum(q_lengths) + behind, heads, d_qk)]
        shapes += [(sum(k_lengths) + behind, kv_heads, d) for d in (d_qk, d_v)]
        queries, keys = max(q_lengths), max(k_lengths)
    elif config.layout == "bmghk":
        groups, inner = 2, 2 if INTERPRET else 3
        heads = groups * inner
        kept = (1 if "expand_groups" in config.features else groups, 1 if "expand_heads" in config.features else inner)
        shapes = [(batch, queries, groups, inner, d_qk), (batch, keys, *kept, d_qk), (batch, keys, *kept, d_v)]
    else:
        order = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "sbhd": (1, 0, 2)}[config.layout]
        kept = 1 if "expand_heads" in config.features else kv_heads
        sizes = ((batch, queries, heads, d_qk), (batch, keys, kept, d_qk), (batch, keys, kept, d_v))
        shapes = [(*(size[dim] for dim in order), size[3]) for size in sizes]
    tensors: dict[str, Tensor | None] = dict(zip(("query", "key", "value"), (normal(*s) for s in shapes), strict=True))
    for feature in config.features:
        _add(feature, tensors, options, rng, normal, integers, (batch, heads, queries, keys), device)
    function = varlen_attention if config.layout == "thd" else attention
    if config.layout != "thd":
        options["layout"] = config.layout

    def call(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Any:
        if "packed" in config.features:
            query, key, value = torch.stack([query, key, value], 2).unbind(2)
        if config.layout == "bmghk":
            key, value = (x.expand(*x.shape[:2], *query.shape[2:4], x.shape[-1]) for x in (key, value))
        elif "expand_heads" in config.features:
            key, value = (x.expand(-1, -1, kv_heads, -1) for x in (key, value))
        return function(query, key, value, return_lse=True, **rest)

    return call, tensors, options


def _add(
    feature: str, tensors: dict, options: dict, rng: random.Random, normal: Any, integers: Any, sizes: Any, device: Any
) -> None:
    batch, heads, queries, keys = sizes
    if feature == "window":
        options["window_size"] = (rng.randint(0, keys), rng.choice((-1, 0, rng.randint(0, 9))))
    elif feature == "chunk":
        options["chunk_size"] = rng.randint(1, max(1, keys))
    elif feature == "prefix":
        options["prefix_lengths"] = integers([rng.randint(0, keys) for _ in range(batch)])
    elif feature == "documents":
        cuts = torch.randint(0, 3, (batch, queries), device=device) == 0
        options["document_ids"] = cuts.cumsum(1).to(torch.int32)
    elif feature == "documents_random":
        options["document_ids"] = tuple(torch.randint(-1, 3, (batch, n), device=device) for n in (queries, keys))
    elif feature == "alibi":
        options["alibi_slopes"] = torch.rand(heads, device=device)
    elif feature == "alibi_batch":
        options["alibi_slopes"] = torch.rand(batch, heads, device=device)
    elif feature == "bias_bool":
        options["attn_bias"] = torch.rand(batch, 1, queries, keys, device=device) > 0.4
    elif feature.startswith("bias"):
        shape = {
            "bias": (batch, heads, queries, keys),
            "bias_no_grad": (1, heads, queries, keys),
            "bias_heads": (batch, 1, queries, keys),
            "bias_batch": (heads, queries, keys),
            "bias_rows": (batch, heads, 1, keys),
            "bias_one": (1, keys),
        }[feature]
        tensors["attn_bias"] = normal(*shape, grad=feature != "bias_no_grad")
    elif feature == "softcap":
        options["softcap"] = rng.choice((1.5, 30.0))
    elif feature == "sinks":
        tensors["sinks"] = normal(heads)
    elif feature == "dropout":
        options["dropout_p"] = 0.25
        options["dropout_seed"] = torch.tensor([rng.getrandbits(62), rng.getrandbits(62)], device=device)
    elif feature == "lengths":
        options["seqused_q"], options["seqused_k"] = (integers(_lengths(rng, batch, n)) for n in (queries, keys))


def errors(
    config: Config,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    largest: int,
    backend: str = "triton",
    with_lse: bool = True,
) -> list[numerics.Error]:
    """The judge's verdicts on one problem: outputs, LSE (unless it is left out) and every gradient."""
    call, tensors, options = make(config, seed, device, dtype, largest)

    def through(backend: str) -> Any:
        def run(**given: Tensor) -> Any:
            out, lse = call(**given, **options, backend=backend)
            return (out, lse.masked_fill(lse == -torch.inf, -1.0)) if with_lse else out

        return run

    found = numerics.errors(through(backend), through("plain"), through("reference"), tensors)
    largest_lse = 0.0 if not with_lse else _rounding(found[1]) / torch.finfo(torch.float32).eps
    # ALiBi's part of a row comes off the LSE at the end: a rounding of slope * distance, however small the LSE
    slopes = options.get("alibi_slopes")
    reach = 0.0 if slopes is None else 4 * torch.finfo(torch.float32).eps * largest * slopes.max().item()
    slack = [_slack(e, dtype, tensors, largest_lse) + (reach if e.name == "out1" else 0.0) for e in found]
    return [replace(error, allowed=error.allowed + more) for error, more in zip(found, slack, strict=True)]


def _rounding(error: numerics.Error) -> float:
    """The one rounding at the result's scale that the judge allows."""
    return error.allowed - 2 * error.plain


def _slack(
    error: numerics.Error, dtype: torch.dtype, tensors: dict[str, Tensor | None], largest_lse: float = 0.0
) -> float:
    """What every online softmax in float32 has beyond the judge's bound, and 16 bits do not notice: p = exp(s - lse) is
    recomputed, a few roundings and those of an LSE made large by ALiBi; and dp - delta is rounded where PyTorch has
    an exact 0 because few keys are seen."""
    roundings = 20.0 if dtype is torch.float32 or error.name == "out1" else 0.0
    if dtype is torch.float32 and error.name.startswith("d"):
        roundings += largest_lse
    return roundings * _rounding(error) + _cancellation(error.name, tensors)


def _cancellation(name: str, tensors: dict[str, Tensor | None]) -> float:
    if name not in ("dquery", "dkey", "dattn_bias", "dsinks"):
        return 0.0
    largest = {key: x.detach().abs().nan_to_num(0).max().item() if x is not None and x.numel() else 0.0
               for key, x in tensors.items()}  # fmt: skip
    width = tensors["value"].shape[-1] ** 0.5
    factor = {"dquery": largest["key"], "dkey": largest["query"]}.get(name, 1.0)
    return 8 * torch.finfo(torch.float32).eps * width * largest["value"] * max(factor, 1.0)
